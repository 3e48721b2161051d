# what: truncating writes into a page that others can find
# file: src/cache.c
# run: test_kvcache
s/p->holders == 1 && !p->is_node\) return/p->holders == 1) return/
