# what: a row sees one key too many at its last bound
# file: src/cpu/attend_block.h
# run: checkattn --fast --isa scalar
s/\(int64_t\)r->last - b->k_pos\[0\] \+ 1/(int64_t)r->last - b->k_pos[0] + 2/
