# what: parts of heads that go together are looked for side by side
# file: src/plan.c
# run: checkplan --count 500
s/n \* t->num_rows, m->bundle_parts/t->num_rows, m->bundle_parts/
