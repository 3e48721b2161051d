# SPDX-License-Identifier: Apache-2.0
# what: hooks on elements see every block of lanes as the first one
# file: src/cpu/hooks_open.h
# run: checkvariant tests/variants/every_hook.c
s/v_iota\(\) \+ i,/v_iota(),/
