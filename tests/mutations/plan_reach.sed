# what: a tile's last visible key is left out
# file: src/plan_cut.h
# run: checkplan --count 2000
s/\*hi = \(int32_t\)to;/*hi = (int32_t)to - 1;/
