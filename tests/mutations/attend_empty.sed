# what: a row that sees nothing is divided by its sum of 0
# file: src/cpu/attend_out.h
# run: checkattn --fast --isa scalar
s/l == 0 \? 0\.0f : l;/w->v_factor \/ l;/
