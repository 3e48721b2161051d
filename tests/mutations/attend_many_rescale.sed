# what: many rows: the sum of earlier blocks is not rescaled when the maximum rises
# file: src/cpu/attend_many.h
# run: checkattn --fast --isa scalar
s/v_fma\(v_load\(w->l \+ at\), alpha, sum\)/v_load(w->l + at) + sum/
