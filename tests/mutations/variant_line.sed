# SPDX-License-Identifier: Apache-2.0
# what: complaints of the compiler count the lines of a text from two
# file: src/cpu/compile.c
# run: test_variant_code
s/#line 1 ..%s/#line 2 \\"%s/
