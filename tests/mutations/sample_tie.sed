# what: top k keeps one value too many
# file: src/cpu/sample_tmpl.c
# run: test_companions
s/larger\.count < l\.count/larger.count <= l.count/
