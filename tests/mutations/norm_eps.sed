# what: layernorm and rmsnorm forget eps
# file: src/cpu/norm_tmpl.c
# run: test_companions
s/square \+ \(double\)job->eps/square/
