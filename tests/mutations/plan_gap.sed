# what: the key at which an item is cut is in no piece
# file: src/plan.c
# run: checkplan --count 2000
s/^        key = at;/        key = at + 1;/
