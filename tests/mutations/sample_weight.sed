# what: a draw passes each value at half its weight
# file: src/cpu/sample_tmpl.c
# run: test_companions
s/r -= weight;/r -= weight \/ 2;/
