# what: a merge adds the second state without its weight
# file: src/cpu/attend_out.h
# run: checkattn --fast --isa scalar
s/v_load\(po \+ d\) \* v_set\(b\)/v_load(po + d)/
