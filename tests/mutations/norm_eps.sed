# what: layernorm and rmsnorm forget eps
# file: src/cpu/norm_tmpl.c
# run: test_companions
s/ \+ \(double\)job->eps \* \(double\)scale \* \(double\)scale//
