# what: the last worker does twice its share
# file: src/plan_cut.h
# run: checkplan --count 2000
s/return total \/ num_workers \* w \+ total % num_workers \* w \/ num_workers;/return total \/ (num_workers + 1) * w;/
