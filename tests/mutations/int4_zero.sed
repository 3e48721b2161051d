# what: odd elements of 4-bit keys and values are read without the zero of their group
# file: src/cpu/attend_block.h
# run: checkattn --fast --isa scalar
s/\(y\[1\] - zero\) \* scale/y[1] * scale/
