# what: a few rows: the sum of earlier blocks is not rescaled when the maximum rises
# file: src/cpu/attend_few.h
# run: checkattn --fast --isa scalar
s/v_fma\(v_load\(w->l \+ at\), alpha, sum_eight\(lanes\)\)/v_load(w->l + at) + sum_eight(lanes)/
