# what: a few rows: the sum of earlier blocks is not rescaled when the maximum rises
# file: src/cpu/attend_few.h
# run: checkattn --fast --isa scalar
s/w->l\[i\] \* w->alpha\[i\] \+ sum_lane/w->l[i] + sum_lane/
