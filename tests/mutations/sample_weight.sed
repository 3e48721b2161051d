# what: a draw leaves a value's weight out of the running sum
# file: src/cpu/sample_tmpl.c
# run: test_companions
s/r -= weight;/r -= weight - (weight > 1000);/
