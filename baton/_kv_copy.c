/* Copies the rows of KV blocks and computes the crc32c of what it copied, in one pass over memory.
 *
 * One function, `move`, walks two sides in step: [layer][component][run][row]. A side is a buffer, where its first row starts,
 * and how far apart layers, components, runs and rows are; a pool names its runs by block ids, a wire buffer has them one after
 * the other. Without a source `move` writes zeros, without a destination it only computes the crc. baton/kv_copy.py says what
 * the sides mean and names the arguments that are wrong; here is what keeps memory safe: every block id and the last byte of
 * either side are checked before the first byte moves, and the GIL is released only after that.
 *
 * The crc is always that of the bytes which reached the destination: a byte is loaded once, or the crc reads the destination. So
 * a source that changes meanwhile can only give a crc that fails. The two sides may not overlap.
 *
 * crc32c: RFC 3720 appendix B.4, polynomial 0x1EDC6F41. Bits are reflected, as there: bit 0 of a byte is the greatest power of
 * x. Tiers, found at import, the fastest is used: folding by carry-less multiplication in 64-byte registers (AVX-512), the same in 16-byte
 * registers (PCLMUL), tables (any little-endian machine).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "KV is little-endian on the wire and in the pools"
#endif

#define POLYNOMIAL 0x82F63B78u /* 0x1EDC6F41 reflected */

/* Copy n bytes (dst may be NULL: only read) and return the crc register after them. `next`: what will be read after that, NULL
 * if it follows at once. `stream`: write around the caches. */
typedef uint32_t Kernel(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next, int stream);

/* ---- tables ---------------------------------------------------------------------------------------------------------- */

static uint32_t table[8][256]; /* table[j][b]: the register after byte b and j zero bytes */

static void fill_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][byte] = crc;
    }
    for (int j = 1; j < 8; j++)
        for (int byte = 0; byte < 256; byte++)
            table[j][byte] = table[0][table[j - 1][byte] & 255] ^ (table[j - 1][byte] >> 8);
}

static uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int j = 0; j < 8; j++) crc ^= table[7 - j][word >> 8 * j & 255];
    }
    for (; n > 0; n--, p++) crc = table[0][(crc ^ *p) & 255] ^ (crc >> 8);
    return crc;
}

static uint32_t copy_portable(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next, int stream) {
    enum { CHUNK = 4096 }; /* a page: still in the first cache when the crc reads it */
    (void)next, (void)stream;
    while (n > 0) {
        size_t part = n < CHUNK ? n : CHUNK;
        if (dst) memcpy(dst, src, part);
        crc = crc_by_table(crc, dst ? dst : src, part);
        if (dst) dst += part;
        src += part;
        n -= part;
    }
    return crc;
}

#if defined(__x86_64__)
/* ---- folding --------------------------------------------------------------------------------------------------------- *
 * A register of 128 bits holds 16 message bytes: A(x) = L(x) x^64 + H(x), where L is its low half. Moving A ahead by D bytes
 * means multiplying it by x^(8D), modulo the polynomial: L(x) x^(8D+64) + H(x) x^(8D). The product of two reflected 64-bit
 * halves comes out one bit low, that is multiplied by x, so the constants are x^(8D+63) and x^(8D-1); each is a remainder of 32
 * bits, the greatest powers of x of its half, hence the shift by 32. What is left at the end is 16 bytes congruent to the whole
 * message, and the crc instruction takes their remainder.
 */
static uint64_t fold_by[3][2]; /* by 16, 64 and 256 bytes: {x^(8D+63), x^(8D-1)} */
enum { BY_16, BY_64, BY_256 };

static uint64_t power_of_x(int exponent) {
    uint32_t remainder = 1u << 31; /* x^0 */
    while (exponent-- > 0) remainder = (remainder >> 1) ^ (remainder & 1 ? POLYNOMIAL : 0);
    return (uint64_t)remainder << 32;
}

static void fill_fold_by(void) {
    for (int i = 0, nbytes = 16; i < 3; i++, nbytes *= 4) {
        fold_by[i][0] = power_of_x(8 * nbytes + 63);
        fold_by[i][1] = power_of_x(8 * nbytes - 1);
    }
}

#define PCLMUL __attribute__((target("sse4.2,pclmul")))
#define AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

/* Few bytes: ends of rows, and rows shorter than a step of the folding loops. */
PCLMUL static uint32_t copy_short(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t n) {
    if (dst) {
        memcpy(dst, src, n);
        src = dst;
    }
    for (; n >= 8; n -= 8, src += 8) {
        uint64_t word;
        memcpy(&word, src, 8);
        crc = (uint32_t)_mm_crc32_u64(crc, word);
    }
    for (; n > 0; n--, src++) crc = _mm_crc32_u8(crc, *src);
    return crc;
}

/* Bytes to copy before dst is aligned to `alignment`, a power of two; streaming stores want that, others like it. */
static size_t bytes_to_alignment(const uint8_t *dst, size_t alignment) {
    return -(uintptr_t)dst & (alignment - 1);
}

PCLMUL static inline __m128i fold16(__m128i a, __m128i by) {
    return _mm_xor_si128(_mm_clmulepi64_si128(a, by, 0x00), _mm_clmulepi64_si128(a, by, 0x11));
}

PCLMUL static inline uint32_t remainder16(__m128i a) {
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(a, 0));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(a, 1));
}

PCLMUL static inline __m128i take16(uint8_t *dst, const uint8_t *src, int stream) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)src);
    if (dst && stream) _mm_stream_si128((__m128i *)dst, bytes);
    else if (dst) _mm_storeu_si128((__m128i *)dst, bytes);
    return bytes;
}

PCLMUL static uint32_t copy_pclmul(
    uint32_t crc, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next, int stream) {
    enum { STEP = 64 };
    (void)next;
    size_t head = bytes_to_alignment(dst, 16);
    if (n < head + STEP) return copy_short(crc, dst, src, n);
    crc = copy_short(crc, dst, src, head);
    const __m128i by_16 = _mm_loadu_si128((const __m128i *)fold_by[BY_16]);
    const __m128i by_64 = _mm_loadu_si128((const __m128i *)fold_by[BY_64]);
    size_t at = head;
#define TAKE(i) take16(dst ? dst + at + 16 * i : NULL, src + at + 16 * i, stream)
    __m128i a = _mm_xor_si128(TAKE(0), _mm_cvtsi32_si128((int)crc)), b = TAKE(1), c = TAKE(2), d = TAKE(3);
    for (at += STEP; at + STEP <= n; at += STEP) {
        a = _mm_xor_si128(fold16(a, by_64), TAKE(0));
        b = _mm_xor_si128(fold16(b, by_64), TAKE(1));
        c = _mm_xor_si128(fold16(c, by_64), TAKE(2));
        d = _mm_xor_si128(fold16(d, by_64), TAKE(3));
    }
#undef TAKE
    a = _mm_xor_si128(fold16(a, by_16), b);
    a = _mm_xor_si128(fold16(a, by_16), c);
    a = _mm_xor_si128(fold16(a, by_16), d);
    return copy_short(remainder16(a), dst ? dst + at : NULL, src + at, n - at);
}

AVX512 static inline __m512i fold64(__m512i a, __m512i by, __m512i next) {
    const int XOR3 = 0x96; /* the truth table of a ^ b ^ c */
    return _mm512_ternarylogic_epi64(
        _mm512_clmulepi64_epi128(a, by, 0x00), _mm512_clmulepi64_epi128(a, by, 0x11), next, XOR3);
}

AVX512 static inline __m512i take64(uint8_t *dst, const uint8_t *src, int stream) {
    __m512i bytes = _mm512_loadu_si512(src);
    if (dst && stream) _mm512_stream_si512((__m512i *)dst, bytes);
    else if (dst) _mm512_storeu_si512(dst, bytes);
    return bytes;
}

/* Scattered runs are too short for the hardware to foresee, so what comes AHEAD bytes later is fetched into the second cache, the
 * start of the next run included; an address that is none does no harm. Measured (Zen 4, permuted runs of 12 KiB, streaming), GB/s:
 * none 9.0, 4 KiB 11.7, 6 KiB 13.5, 8 KiB 11.3, 10 KiB 13.0; runs of 32 KiB: 12.4, 11.3, 13.2, 11.4, 13.7. */
enum { AHEAD = 6144 };

static inline void prefetch256(const uint8_t *p) {
    for (int i = 0; i < 256; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

AVX512 static uint32_t copy_avx512(
    uint32_t crc, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next, int stream) {
    enum { STEP = 256 };
    size_t head = bytes_to_alignment(dst, 64);
    if (n < head + STEP) return copy_pclmul(crc, dst, src, n, next, stream);
    crc = copy_short(crc, dst, src, head);
    const __m128i by_16 = _mm_loadu_si128((const __m128i *)fold_by[BY_16]);
    const __m512i by_64 = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fold_by[BY_64]));
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fold_by[BY_256]));
    size_t at = head, ahead = n < AHEAD ? n : AHEAD;
#define TAKE(i) take64(dst ? dst + at + 64 * i : NULL, src + at + 64 * i, stream)
    __m512i a = _mm512_xor_si512(TAKE(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i b = TAKE(1), c = TAKE(2), d = TAKE(3);
    for (at += STEP; at + STEP <= n; at += STEP) {
        if (next) prefetch256(at + ahead < n ? src + at + ahead : next + (at + ahead - n));
        a = fold64(a, by_256, TAKE(0));
        b = fold64(b, by_256, TAKE(1));
        c = fold64(c, by_256, TAKE(2));
        d = fold64(d, by_256, TAKE(3));
    }
#undef TAKE
    a = fold64(fold64(fold64(a, by_64, b), by_64, c), by_64, d);
    __m128i rest = _mm512_extracti32x4_epi32(a, 0);
    rest = _mm_xor_si128(fold16(rest, by_16), _mm512_extracti32x4_epi32(a, 1));
    rest = _mm_xor_si128(fold16(rest, by_16), _mm512_extracti32x4_epi32(a, 2));
    rest = _mm_xor_si128(fold16(rest, by_16), _mm512_extracti32x4_epi32(a, 3));
    return copy_short(remainder16(rest), dst ? dst + at : NULL, src + at, n - at);
}
#endif

/* ---- tiers ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    Kernel *copy;
} Tier;

static Tier tiers[3]; /* those this machine can run, slowest first */
static int num_tiers;

static void find_tiers(void) {
    num_tiers = 0;
    tiers[num_tiers++] = (Tier){"portable", copy_portable};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
        tiers[num_tiers++] = (Tier){"pclmul", copy_pclmul};
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("vpclmulqdq"))
            tiers[num_tiers++] = (Tier){"avx512", copy_avx512};
    }
#endif
}

/* ---- sides ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name, *ids_name;
    Py_buffer bytes, ids; /* ids: u32 per run, or none: run i is the i-th */
    Py_ssize_t first_byte, layer_stride, component_stride, run_stride, row_stride, num_blocks;
} Side;

typedef struct {
    Py_ssize_t layers, components, runs, rows, row_bytes;
} Shape;

static void release(Side *side) {
    PyBuffer_Release(&side->bytes); /* harmless where nothing was acquired: the struct is zeros then */
    PyBuffer_Release(&side->ids);
}

/* Add count * stride to *end; 0 if a number is negative or too large. */
static int add(Py_ssize_t *end, Py_ssize_t count, Py_ssize_t stride) {
    Py_ssize_t product;
    return count >= 0 && stride >= 0 && !__builtin_mul_overflow(count, stride, &product) &&
           !__builtin_add_overflow(*end, product, end);
}

/* Whether every byte of every run lies in the side's buffer. */
static int check(const Side *side, const Shape *shape) {
    if (side->ids.buf) {
        const uint32_t *ids = side->ids.buf;
        if (side->ids.len != shape->runs * (Py_ssize_t)sizeof *ids || side->ids.itemsize != sizeof *ids) {
            PyErr_Format(PyExc_ValueError, "%s must be %zd u32", side->ids_name, shape->runs);
            return 0;
        }
        for (Py_ssize_t i = 0; i < shape->runs; i++)
            if ((Py_ssize_t)ids[i] >= side->num_blocks) {
                PyErr_Format(PyExc_ValueError, "%s[%zd] = %u is not one of %zd blocks", side->ids_name, i, ids[i],
                             side->num_blocks);
                return 0;
            }
    }
    Py_ssize_t end = 0, last_block = side->ids.buf ? side->num_blocks - 1 : shape->runs - 1;
    if (!add(&end, side->first_byte, 1) || !add(&end, shape->layers - 1, side->layer_stride) ||
        !add(&end, shape->components - 1, side->component_stride) || !add(&end, last_block, side->run_stride) ||
        !add(&end, shape->rows - 1, side->row_stride) || !add(&end, shape->row_bytes, 1) || end > side->bytes.len) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes do not hold what its strides say", side->name, side->bytes.len);
        return 0;
    }
    return 1;
}

/* Read a side from its tuple; None stays empty. 0 with an exception set if it is no side. */
static int parse(PyObject *tuple, int writable, Side *side) {
    PyObject *bytes, *ids;
    if (tuple == Py_None) return 1;
    if (!PyArg_ParseTuple(tuple, "sOnnnnnsOn", &side->name, &bytes, &side->first_byte, &side->layer_stride,
                          &side->component_stride, &side->run_stride, &side->row_stride, &side->ids_name, &ids,
                          &side->num_blocks))
        return 0;
    if (PyObject_GetBuffer(bytes, &side->bytes, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return 0;
    return ids == Py_None || PyObject_GetBuffer(ids, &side->ids, PyBUF_ND) == 0;
}

static uint8_t *run_at(const Side *side, Py_ssize_t layer, Py_ssize_t component, Py_ssize_t run) {
    Py_ssize_t block = side->ids.buf ? (Py_ssize_t)((const uint32_t *)side->ids.buf)[run] : run;
    return (uint8_t *)side->bytes.buf + side->first_byte + layer * side->layer_stride + component * side->component_stride +
           block * side->run_stride;
}

/* ---- move ------------------------------------------------------------------------------------------------------------ */

/* Copy, clear or only read one run; `next` is the run after it, NULL if the source is dense. */
static uint32_t move_run(uint32_t crc, const Side *src, const uint8_t *from, const uint8_t *next, const Side *dst, uint8_t *to,
                         const Shape *shape, Kernel *copy, int stream) {
    size_t row_bytes = (size_t)shape->row_bytes;
    for (Py_ssize_t row = 0; row < shape->rows; row++) {
        if (from) {
            const uint8_t *next_row = next && row + 1 < shape->rows ? from + src->row_stride : next;
            crc = copy(crc, to, from, row_bytes, next_row, stream);
            from += src->row_stride;
        } else {
            memset(to, 0, row_bytes);
        }
        if (to) to += dst->row_stride;
    }
    return crc;
}

static uint32_t move_all(const Side *src, const Side *dst, const Shape *shape, Kernel *copy, int stream) {
    uint32_t crc = 0xFFFFFFFF;
    for (Py_ssize_t layer = 0; layer < shape->layers; layer++)
        for (Py_ssize_t component = 0; component < shape->components; component++)
            for (Py_ssize_t run = 0; run < shape->runs; run++) {
                const uint8_t *from = NULL, *next = NULL;
                if (src->bytes.buf) from = run_at(src, layer, component, run);
                if (src->ids.buf) next = run + 1 < shape->runs ? run_at(src, layer, component, run + 1) : from;
                uint8_t *to = dst->bytes.buf ? run_at(dst, layer, component, run) : NULL;
                crc = move_run(crc, src, from, next, dst, to, shape, copy, stream);
            }
#if defined(__x86_64__)
    if (stream) _mm_sfence(); /* streaming stores are weakly ordered: whoever is told of them must see them */
#endif
    return ~crc;
}

static PyObject *move(PyObject *module, PyObject *args) {
    PyObject *src_tuple, *dst_tuple, *result = NULL;
    Shape shape;
    Side src = {0}, dst = {0};
    int tier, stream;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO(nnnnn)pi:move", &src_tuple, &dst_tuple, &shape.layers, &shape.components, &shape.runs,
                          &shape.rows, &shape.row_bytes, &stream, &tier))
        return NULL;
    if (tier >= num_tiers || tier < -num_tiers) return PyErr_Format(PyExc_ValueError, "tier %d is not one of TIERS", tier);
    int empty = shape.layers < 1 || shape.components < 1 || shape.runs < 1 || shape.rows < 1 || shape.row_bytes < 1;
    if (parse(src_tuple, 0, &src) && parse(dst_tuple, 1, &dst)) {
        if (empty || (src_tuple == Py_None && dst_tuple == Py_None)) {
            PyErr_SetString(PyExc_ValueError, "nothing to move");
        } else if ((src_tuple == Py_None || check(&src, &shape)) && (dst_tuple == Py_None || check(&dst, &shape))) {
            uint32_t crc;
            Py_BEGIN_ALLOW_THREADS
            crc = move_all(&src, &dst, &shape, tiers[tier < 0 ? tier + num_tiers : tier].copy, stream);
            Py_END_ALLOW_THREADS
            result = PyLong_FromUnsignedLong(crc);
        }
    }
    release(&src);
    release(&dst);
    return result;
}

/* The crc32c of one contiguous buffer, without move's ceremony. Headers are 60 bytes, done in nanoseconds: who gave the GIL away
 * for them would wait a switch interval of a busy thread to have it back. 64 KiB take some 4 us. */
#define GIL_BYTES (64 << 10)

static PyObject *crc32c(PyObject *module, PyObject *object) {
    Py_buffer data;
    (void)module;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) return NULL;
    PyThreadState *released = data.len > GIL_BYTES ? PyEval_SaveThread() : NULL;
    uint32_t crc = tiers[num_tiers - 1].copy(0xFFFFFFFF, NULL, data.buf, (size_t)data.len, NULL, 0);
    if (released) PyEval_RestoreThread(released);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(~crc & 0xFFFFFFFF);
}

/* ---- module ---------------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"move", move, METH_VARARGS, "move(src, dst, shape, stream, tier) -> crc32c; see baton/kv_copy.py."},
    {"crc32c", crc32c, METH_O, "crc32c(data) -> the crc32c of contiguous bytes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "baton._kv_copy", .m_doc = "See baton/kv_copy.py.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kv_copy(void) {
    fill_table();
#if defined(__x86_64__)
    fill_fold_by();
#endif
    find_tiers();
    PyObject *module = PyModule_Create(&definition);
    PyObject *names = PyTuple_New(num_tiers);
    if (!module || !names) goto failed;
    for (int i = 0; i < num_tiers; i++) {
        PyObject *name = PyUnicode_FromString(tiers[i].name);
        if (!name) goto failed;
        PyTuple_SET_ITEM(names, i, name);
    }
    if (PyModule_AddObjectRef(module, "TIERS", names) < 0) goto failed;
    Py_DECREF(names);
    return module;
failed:
    Py_XDECREF(names);
    Py_XDECREF(module);
    return NULL;
}
