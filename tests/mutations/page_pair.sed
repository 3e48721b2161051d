# what: values in the order "tiles" all lie where those of even tokens do
# file: src/cpu/ops_tmpl.c
# run: test_ops
s/\+ where\.token % 2\)/+ 0)/
