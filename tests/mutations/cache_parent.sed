# what: the prefix tree finds a key below any parent
# file: src/cache_pages.c
# run: test_kvcache
s/p->key == key && p->parent == parent/p->key == key/
