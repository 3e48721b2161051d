# what: the last worker does twice its share
# file: src/plan_cut.h
# run: checkplan --count 2000
s/const fv__cut_steps s = \{ 0, total \/ num_workers, /const fv__cut_steps s = { 0, total \/ (num_workers + 1), /
