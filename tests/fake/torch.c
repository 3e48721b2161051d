/* SPDX-License-Identifier: Apache-2.0 */
/* torch.c -- stands in for libtorch_cpu.so where foveal bench has a peer: attention in double of bf16 tensors, with heads in groups, laid out as torch does
 * it ([requests][rows][heads][dim]). FAKE_TORCH: "refuse" takes no grouped heads, "wrong" forgets the scale. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct tensor {
    uint16_t *data;
    int64_t shape[4], stride[4];
    int owned;
} tensor;

static double load(uint16_t code)
{
    const uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t store(double x)
{
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t *at(const tensor *t, int64_t i, int64_t j, int64_t k) { return t->data + i * t->stride[0] + j * t->stride[1] + k * t->stride[2]; }
static int is(const char *what) { return getenv("FAKE_TORCH") && !strcmp(getenv("FAKE_TORCH"), what); }

uint64_t aoti_torch_abi_version(void) { return (uint64_t)9 << 56 | (uint64_t)8 << 48; }
int32_t aoti_torch_dtype_bfloat16(void) { return 15; }
int32_t aoti_torch_device_type_cpu(void) { return 0; }

int32_t aoti_torch_create_tensor_from_blob(void *data, int64_t ndim, const int64_t *shape, const int64_t *stride, int64_t offset, int32_t dtype,
                                           int32_t device_type, int32_t device, tensor **out)
{
    tensor *t = calloc(1, sizeof *t);
    if (ndim != 4 || offset || dtype != 15 || device_type || device) abort();
    t->data = data;
    memcpy(t->shape, shape, sizeof t->shape);
    memcpy(t->stride, stride, sizeof t->stride);
    *out = t;
    return 0;
}

int32_t aoti_torch_delete_tensor_object(tensor *t)
{
    if (t->owned) free(t->data);
    free(t);
    return 0;
}

int32_t aoti_torch_get_data_ptr(tensor *t, void **out) { *out = t->data; return 0; }
int32_t aoti_torch_get_stride(tensor *t, int64_t axis, int64_t *out) { *out = t->stride[axis]; return 0; }

static void attend(const tensor *q, const tensor *k, const tensor *v, int64_t r, int64_t h, int64_t row, int64_t keys, double scale, uint16_t *to)
{
    const int64_t dim = q->shape[3], kv = h / (q->shape[1] / k->shape[1]);
    double *o = calloc((size_t)dim, sizeof *o), sum = 0;
    for (int64_t key = 0; key < keys; key++) {
        double s = 0;
        for (int64_t i = 0; i < dim; i++) s += load(at(q, r, h, row)[i]) * load(at(k, r, kv, key)[i]);
        const double weight = exp(s * scale);           /* scores of a bench are small */
        sum += weight;
        for (int64_t i = 0; i < dim; i++) o[i] += weight * load(at(v, r, kv, key)[i]);
    }
    for (int64_t i = 0; i < dim; i++) to[i] = store(o[i] / sum);
    free(o);
}

int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(tensor *q, tensor *k, tensor *v, double dropout, int32_t causal, tensor **mask,
                                                                  double *scale, tensor **out, tensor **lse)
{
    const int64_t requests = q->shape[0], heads = q->shape[1], rows = q->shape[2], dim = q->shape[3];
    const int64_t shape[] = { requests, heads, rows, dim }, stride[] = { rows * heads * dim, dim, heads * dim, 1 };
    if (dropout != 0 || mask) abort();
    if (is("refuse") && heads != k->shape[1]) return 1;
    aoti_torch_create_tensor_from_blob(calloc((size_t)(requests * stride[0]), 2), 4, shape, stride, 0, 15, 0, 0, out);
    (*out)->owned = 1;
    *lse = calloc(1, sizeof **lse);
    for (int64_t r = 0; r < requests; r++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t row = 0; row < rows; row++)
                attend(q, k, v, r, h, row, causal ? row + 1 : k->shape[2], is("wrong") ? 1 : *scale, at(*out, r, h, row));
    return 0;
}
