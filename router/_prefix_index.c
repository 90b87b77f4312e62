/* From block hash to the workers that cache the block: the one inverted index of a router process.
 *
 * router/prefix_index.py says what it means; here is its memory. A table of SEGMENTS open-addressed parts, chosen by the hash's
 * low byte, so that growing one moves a 256th of all entries. An entry is 16 bytes: 8 of the block's hash (its halves, one xor
 * the other), and its holders: up to four ids inline, sorted, or the number of a bitset where there are more. Two of 10 million
 * blocks share a key with a chance of 3e-6, and what comes out is a hint anyway.
 *
 * A worker is known by its row outside and by an id inside. `reset` gives the row a fresh id in O(1); entries of the old one are
 * dead, are swept a few at a time by later changes, and the id returns to use after a whole sweep. Entries move when one before
 * them is deleted (backward shift) or a part grows; a moved one is cleaned on the way, so none slips past the sweep.
 *
 * Beyond max_blocks entries, or max_blocks / 8 bitsets, additions are ignored and counted. All under the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEGMENTS = 256,
    MIN_SLOTS = 16,
    INLINE = 4,
    MANY = 0xFFFF,        /* ids[0] of an entry whose holders are a bitset; its number is in ids[2..3] */
    SWEEP_SLOTS = 1024,   /* per change: 16 KiB of memory, some microseconds */
    LOOK_AHEAD = 8,       /* entries asked of memory before they are needed */
    MAX_ROWS = 16384,     /* ids are twice that, below MANY */
};

typedef struct {
    uint64_t key; /* 0 = empty */
    uint16_t ids[INLINE];
} Entry;

typedef struct {
    Entry *entries;
    uint32_t num_slots, num_used;
} Segment;

typedef struct {
    PyObject_HEAD
    Segment segments[SEGMENTS];
    Py_ssize_t max_blocks, num_blocks, num_ignored;
    uint32_t max_rows, num_ids, num_words; /* ids 1 .. num_ids - 1; words of a bitset */
    uint32_t used_words;                   /* of every bitset: beyond them no id was ever used */
    uint16_t *id_of_row;                   /* 0 = none */
    uint16_t *row_of_id;                   /* of living ids */
    uint8_t *state_of_id;                  /* of all ids */
    Py_ssize_t *count_of_row;
    uint64_t *sets; /* [max_sets or fewer][num_words] */
    uint32_t num_sets, max_sets, free_set, num_free_sets;
    uint32_t sweep_segment, sweep_slot, num_dead;
    uint64_t *scratch; /* [2][num_words] */
} Index;

enum { UNUSED, ALIVE, DEAD, SWEPT }; /* of an id; SWEPT: died before the sweep now under way began */

/* ---- holders ---------------------------------------------------------------------------------------------------------- */

static uint32_t set_number(const Entry *entry) { return entry->ids[2] | (uint32_t)entry->ids[3] << 16; }

static uint64_t *set_of(const Index *index, const Entry *entry) {
    return index->sets + (size_t)set_number(entry) * index->num_words;
}

static int is_many(const Entry *entry) { return entry->ids[0] == MANY; }

/* A zeroed bitset's number, -1 where there is no room. Free ones form a list through their first word. */
static int64_t new_set(Index *index) {
    uint32_t number;
    if (index->num_free_sets) {
        number = index->free_set;
        index->free_set = (uint32_t)index->sets[(size_t)number * index->num_words];
        index->num_free_sets--;
    } else {
        if (index->num_sets == index->max_sets) return -1;
        if ((index->num_sets & (index->num_sets - 1)) == 0) { /* full at powers of two */
            size_t room = index->num_sets ? 2 * (size_t)index->num_sets : 1;
            uint64_t *sets = realloc(index->sets, room * index->num_words * sizeof *sets);
            if (!sets) return -1;
            index->sets = sets;
        }
        number = index->num_sets++;
    }
    memset(index->sets + (size_t)number * index->num_words, 0, index->num_words * sizeof *index->sets);
    return number;
}

static void free_set(Index *index, uint32_t number) {
    index->sets[(size_t)number * index->num_words] = index->free_set;
    index->free_set = number;
    index->num_free_sets++;
}

/* 1 = added, 0 = was there, -1 = no room. */
static int add_holder(Index *index, Entry *entry, uint16_t id) {
    if (is_many(entry)) {
        uint64_t *word = set_of(index, entry) + id / 64, bit = 1ull << id % 64;
        if (*word & bit) return 0;
        *word |= bit;
        return 1;
    }
    int n = 0;
    for (; n < INLINE && entry->ids[n]; n++)
        if (entry->ids[n] == id) return 0;
    if (n == INLINE) {
        int64_t number = new_set(index);
        if (number < 0) return -1;
        uint64_t *set = index->sets + (size_t)number * index->num_words;
        for (int i = 0; i < INLINE; i++) set[entry->ids[i] / 64] |= 1ull << entry->ids[i] % 64;
        set[id / 64] |= 1ull << id % 64;
        entry->ids[0] = MANY;
        entry->ids[2] = (uint16_t)number, entry->ids[3] = (uint16_t)(number >> 16);
        return 1;
    }
    for (; n > 0 && entry->ids[n - 1] > id; n--) entry->ids[n] = entry->ids[n - 1];
    entry->ids[n] = id;
    return 1;
}

/* Bring a bitset of few back inline. */
static void shrink(Index *index, Entry *entry) {
    uint64_t *set = set_of(index, entry);
    uint16_t ids[INLINE] = {0};
    int n = 0;
    for (uint32_t w = 0; w < index->num_words; w++)
        for (uint64_t left = set[w]; left; left &= left - 1) {
            if (n == INLINE) return;
            ids[n++] = (uint16_t)(w * 64 + (uint32_t)__builtin_ctzll(left));
        }
    free_set(index, set_number(entry));
    memcpy(entry->ids, ids, sizeof ids);
}

static int remove_holder(Index *index, Entry *entry, uint16_t id) {
    if (is_many(entry)) {
        uint64_t *word = set_of(index, entry) + id / 64, bit = 1ull << id % 64;
        if (!(*word & bit)) return 0;
        *word &= ~bit;
        shrink(index, entry);
        return 1;
    }
    for (int n = 0; n < INLINE && entry->ids[n]; n++)
        if (entry->ids[n] == id) {
            for (; n < INLINE - 1; n++) entry->ids[n] = entry->ids[n + 1];
            entry->ids[INLINE - 1] = 0;
            return 1;
        }
    return 0;
}

/* Drop dead holders. */
static void clean(Index *index, Entry *entry) {
    if (!index->num_dead) return;
    if (is_many(entry)) {
        uint64_t *set = set_of(index, entry);
        for (uint32_t w = 0; w < index->num_words; w++)
            for (uint64_t left = set[w]; left; left &= left - 1) {
                uint32_t bit = (uint32_t)__builtin_ctzll(left);
                if (index->state_of_id[w * 64 + bit] != ALIVE) set[w] &= ~(1ull << bit);
            }
        shrink(index, entry);
        return;
    }
    uint16_t ids[INLINE] = {0};
    int n = 0;
    for (int i = 0; i < INLINE && entry->ids[i]; i++)
        if (index->state_of_id[entry->ids[i]] == ALIVE) ids[n++] = entry->ids[i];
    memcpy(entry->ids, ids, sizeof ids);
}

/* ---- table ------------------------------------------------------------------------------------------------------------ */

static uint64_t key_of(const char *hash, size_t nbytes) {
    uint64_t halves[2] = {0};
    memcpy(halves, hash, nbytes < sizeof halves ? nbytes : sizeof halves);
    uint64_t key = halves[0] ^ halves[1];
    return key ? key : 1;
}

static uint32_t home(const Segment *segment, uint64_t key) {
    return (uint32_t)((key >> 32) * segment->num_slots >> 32);
}

static Segment *segment_of(Index *index, uint64_t key) { return &index->segments[key % SEGMENTS]; }

/* Where the key is, or the empty slot where it would go. The segment has at least one empty slot. */
static Entry *find(const Segment *segment, uint64_t key) {
    uint32_t slot = home(segment, key);
    while (segment->entries[slot].key && segment->entries[slot].key != key)
        if (++slot == segment->num_slots) slot = 0;
    return &segment->entries[slot];
}

/* Make room for one more at four fifths at most. 0 = no memory. */
static int reserve(Index *index, Segment *segment) {
    if ((uint64_t)(segment->num_used + 1) * 5 <= (uint64_t)segment->num_slots * 4) return 1;
    uint32_t num_slots = segment->num_slots ? segment->num_slots + segment->num_slots / 2 : MIN_SLOTS;
    Segment grown = {calloc(num_slots, sizeof(Entry)), num_slots, segment->num_used};
    if (!grown.entries) return 0;
    for (uint32_t slot = 0; slot < segment->num_slots; slot++)
        if (segment->entries[slot].key) {
            Entry *to = find(&grown, segment->entries[slot].key);
            *to = segment->entries[slot];
            clean(index, to);
        }
    free(segment->entries);
    *segment = grown;
    return 1;
}

/* Empty a slot and close the gap, so that probing needs no tombstones. */
static void delete(Index *index, Segment *segment, Entry *entry) {
    uint32_t gap = (uint32_t)(entry - segment->entries), slot = gap;
    for (;;) {
        if (++slot == segment->num_slots) slot = 0;
        Entry *next = &segment->entries[slot];
        if (!next->key) break;
        uint32_t from_home = slot - home(segment, next->key), from_gap = slot - gap;
        if (from_home > slot) from_home += segment->num_slots;
        if (from_gap > slot) from_gap += segment->num_slots;
        if (from_home < from_gap) continue; /* its home lies behind the gap */
        segment->entries[gap] = *next;
        clean(index, &segment->entries[gap]);
        gap = slot;
    }
    memset(&segment->entries[gap], 0, sizeof(Entry));
    segment->num_used--;
    index->num_blocks--;
}

/* Clean some slots; at the end of a round, ids that were dead at its beginning are free, since no entry names them. */
static void sweep(Index *index) {
    for (int budget = SWEEP_SLOTS; index->num_dead && budget > 0; budget--) {
        Segment *segment = &index->segments[index->sweep_segment];
        if (index->sweep_slot < segment->num_slots) {
            Entry *entry = &segment->entries[index->sweep_slot];
            if (entry->key) clean(index, entry);
            if (entry->key && !entry->ids[0])
                delete (index, segment, entry); /* and look at what took its place */
            else
                index->sweep_slot++;
            continue;
        }
        index->sweep_slot = 0;
        if (++index->sweep_segment < SEGMENTS) continue;
        index->sweep_segment = 0;
        for (uint32_t id = 1; id < index->num_ids; id++) {
            if (index->state_of_id[id] == SWEPT) index->state_of_id[id] = UNUSED, index->num_dead--;
            if (index->state_of_id[id] == DEAD) index->state_of_id[id] = SWEPT;
        }
    }
}

/* ---- methods ---------------------------------------------------------------------------------------------------------- */

static int row_in(const Index *index, Py_ssize_t row) {
    if (row >= 0 && row < (Py_ssize_t)index->max_rows) return 1;
    PyErr_Format(PyExc_ValueError, "row = %zd is not one of %u", row, index->max_rows);
    return 0;
}

static void retire(Index *index, Py_ssize_t row) {
    uint16_t id = index->id_of_row[row];
    if (id && index->count_of_row[row]) {
        index->state_of_id[id] = DEAD;
        index->num_dead++;
    } else if (id) {
        index->state_of_id[id] = UNUSED;
    }
    index->id_of_row[row] = 0;
    index->count_of_row[row] = 0;
}

static uint16_t unused_id(const Index *index) {
    for (uint32_t id = 1; id < index->num_ids; id++)
        if (index->state_of_id[id] == UNUSED) return (uint16_t)id;
    return 0;
}

/* A living id for the row. Where dead ones hold all, sweeping goes on to the end of its rounds: thousands of resets at once. */
static uint16_t id_for(Index *index, Py_ssize_t row) {
    if (index->id_of_row[row]) return index->id_of_row[row];
    uint16_t id;
    while (!(id = unused_id(index))) sweep(index);
    index->state_of_id[id] = ALIVE;
    index->row_of_id[id] = (uint16_t)row;
    if (index->used_words < id / 64u + 1) index->used_words = id / 64u + 1;
    return index->id_of_row[row] = id;
}

static PyObject *Index_reset(Index *index, PyObject *arg) {
    Py_ssize_t row = PyLong_AsSsize_t(arg);
    if ((row == -1 && PyErr_Occurred()) || !row_in(index, row)) return NULL;
    retire(index, row);
    Py_RETURN_NONE;
}

static void add(Index *index, uint16_t id, Py_ssize_t row, uint64_t key) {
    Segment *segment = segment_of(index, key);
    if (!reserve(index, segment)) {
        index->num_ignored++;
        return;
    }
    Entry *entry = find(segment, key);
    if (!entry->key) {
        if (index->num_blocks == index->max_blocks) {
            index->num_ignored++;
            return;
        }
        entry->key = key;
        segment->num_used++;
        index->num_blocks++;
    }
    int added = add_holder(index, entry, id);
    if (added > 0) index->count_of_row[row]++;
    if (added < 0) index->num_ignored++;
}

static void discard(Index *index, uint16_t id, Py_ssize_t row, uint64_t key) {
    Segment *segment = segment_of(index, key);
    if (!segment->num_used) return;
    Entry *entry = find(segment, key);
    if (!entry->key || !remove_holder(index, entry, id)) return;
    index->count_of_row[row]--;
    clean(index, entry);
    if (!entry->ids[0]) delete (index, segment, entry);
}

/* Item i of a fast sequence as a key; 0 with an exception set where it is no hash. */
static uint64_t key_at(PyObject *hashes, Py_ssize_t i) {
    PyObject *hash = PySequence_Fast_GET_ITEM(hashes, i);
    if (PyBytes_Check(hash)) return key_of(PyBytes_AS_STRING(hash), (size_t)PyBytes_GET_SIZE(hash));
    PyErr_Format(PyExc_TypeError, "hash %zd is not bytes", i);
    return 0;
}

static int all_keys(PyObject *hashes) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(hashes); i++)
        if (!key_at(hashes, i)) return 0;
    return 1;
}

static PyObject *Index_apply(Index *index, PyObject *args) {
    Py_ssize_t row;
    PyObject *added_arg, *removed_arg, *added = NULL, *removed = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "nOO:apply", &row, &added_arg, &removed_arg) || !row_in(index, row)) return NULL;
    added = PySequence_Fast(added_arg, "added is no sequence");
    removed = PySequence_Fast(removed_arg, "removed is no sequence");
    if (added && removed && all_keys(added) && all_keys(removed)) {
        uint16_t id = id_for(index, row);
        sweep(index);
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(removed); i++) discard(index, id, row, key_at(removed, i));
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(added); i++) add(index, id, row, key_at(added, i));
        result = Py_NewRef(Py_None);
    }
    Py_XDECREF(added);
    Py_XDECREF(removed);
    return result;
}

static PyObject *Index_count(Index *index, PyObject *arg) {
    Py_ssize_t row = PyLong_AsSsize_t(arg);
    if ((row == -1 && PyErr_Occurred()) || !row_in(index, row)) return NULL;
    return PyLong_FromSsize_t(index->count_of_row[row]);
}

static void holders_to_bits(const Index *index, const Entry *entry, uint64_t *bits) {
    if (is_many(entry)) {
        memcpy(bits, set_of(index, entry), index->used_words * sizeof *bits);
        return;
    }
    memset(bits, 0, index->used_words * sizeof *bits);
    for (int i = 0; i < INLINE && entry->ids[i]; i++) bits[entry->ids[i] / 64] |= 1ull << entry->ids[i] % 64;
}

/* Say `depth` of every living id in `bits`, as far as rows go. */
static void say(const Index *index, const uint64_t *bits, int32_t depth, int32_t *out, Py_ssize_t num_rows) {
    for (uint32_t w = 0; w < index->used_words; w++)
        for (uint64_t left = bits[w]; left; left &= left - 1) {
            uint32_t id = w * 64 + (uint32_t)__builtin_ctzll(left);
            uint16_t row = index->row_of_id[id];
            if (index->state_of_id[id] == ALIVE && row < num_rows && out[row] < depth) out[row] = depth;
        }
}

static void look_ahead(Index *index, PyObject *hashes, Py_ssize_t i) {
    uint64_t key = key_at(hashes, i);
    Segment *segment = segment_of(index, key);
    if (segment->num_used) __builtin_prefetch(&segment->entries[home(segment, key)]);
}

/* Follow the prompt while anybody caches all of it up to here; who drops out has his depth. */
static void match(Index *index, PyObject *hashes, int32_t *out, Py_ssize_t num_rows) {
    Py_ssize_t depth = 0, num_hashes = PySequence_Fast_GET_SIZE(hashes);
    uint64_t *all = index->scratch, *here = index->scratch + index->num_words, last = 0;
    uint32_t num_words = index->used_words;
    for (Py_ssize_t i = 0; i < num_hashes && i < LOOK_AHEAD; i++) look_ahead(index, hashes, i);
    for (; depth < num_hashes; depth++) {
        uint64_t key = key_at(hashes, depth), ids, any = 0, dropped = 0;
        if (depth + LOOK_AHEAD < num_hashes) look_ahead(index, hashes, depth + LOOK_AHEAD);
        Segment *segment = segment_of(index, key);
        const Entry *entry = segment->num_used ? find(segment, key) : NULL;
        if (!entry || !entry->ids[0]) break;
        memcpy(&ids, entry->ids, sizeof ids);
        if (ids == last && !is_many(entry)) continue; /* the same few as before */
        last = ids;
        holders_to_bits(index, entry, here);
        if (depth == 0) {
            memcpy(all, here, num_words * sizeof *all);
            continue;
        }
        for (uint32_t w = 0; w < num_words; w++) {
            uint64_t stay = all[w] & here[w];
            here[w] = all[w] ^ stay;
            all[w] = stay;
            any |= stay;
            dropped |= here[w];
        }
        if (dropped) say(index, here, (int32_t)depth, out, num_rows);
        if (!any) return;
    }
    if (depth) say(index, all, (int32_t)depth, out, num_rows);
}

static PyObject *Index_match(Index *index, PyObject *args) {
    PyObject *hashes_arg, *hashes, *result = NULL;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "Ow*:match", &hashes_arg, &out)) return NULL;
    hashes = PySequence_Fast(hashes_arg, "hashes is no sequence");
    if (hashes && all_keys(hashes)) {
        match(index, hashes, out.buf, out.len / (Py_ssize_t)sizeof(int32_t));
        result = Py_NewRef(Py_None);
    }
    Py_XDECREF(hashes);
    PyBuffer_Release(&out);
    return result;
}

static PyObject *Index_nbytes(Index *index, void *closure) {
    size_t nbytes = sizeof *index + (size_t)index->num_ids * 3 + (size_t)index->max_rows * (2 + sizeof(Py_ssize_t));
    size_t room = 1;
    (void)closure;
    while (room < index->num_sets) room *= 2;
    for (int i = 0; i < SEGMENTS; i++) nbytes += (size_t)index->segments[i].num_slots * sizeof(Entry);
    return PyLong_FromSize_t(nbytes + (room + 2) * index->num_words * sizeof(uint64_t));
}

static PyObject *Index_num_blocks(Index *index, void *closure) {
    (void)closure;
    return PyLong_FromSsize_t(index->num_blocks);
}

static PyObject *Index_num_ignored(Index *index, void *closure) {
    (void)closure;
    return PyLong_FromSsize_t(index->num_ignored);
}

static void Index_dealloc(Index *index) {
    for (int i = 0; i < SEGMENTS; i++) free(index->segments[i].entries);
    free(index->id_of_row);
    free(index->row_of_id);
    free(index->state_of_id);
    free(index->count_of_row);
    free(index->sets);
    free(index->scratch);
    Py_TYPE(index)->tp_free((PyObject *)index);
}

static PyObject *Index_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"max_blocks", "max_rows", NULL};
    Py_ssize_t max_blocks, max_rows;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nn:Index", names, &max_blocks, &max_rows)) return NULL;
    if (max_blocks < 1 || max_blocks > UINT32_MAX) return PyErr_Format(PyExc_ValueError, "max_blocks = %zd", max_blocks);
    if (max_rows < 1 || max_rows > MAX_ROWS)
        return PyErr_Format(PyExc_ValueError, "max_rows = %zd; the limit is %d", max_rows, MAX_ROWS);
    Index *index = (Index *)type->tp_alloc(type, 0); /* zeroed */
    if (!index) return NULL;
    index->max_blocks = max_blocks;
    index->max_rows = (uint32_t)max_rows;
    index->num_words = (uint32_t)(2 * max_rows + 63) / 64 + 1;
    index->num_ids = 2 * index->max_rows + 1;
    index->max_sets = (uint32_t)(max_blocks / 8 + 1);
    index->id_of_row = calloc(index->max_rows, sizeof *index->id_of_row);
    index->row_of_id = calloc(index->num_ids, sizeof *index->row_of_id);
    index->state_of_id = calloc(index->num_words * 64, sizeof *index->state_of_id);
    index->count_of_row = calloc(index->max_rows, sizeof *index->count_of_row);
    index->scratch = calloc(2 * (size_t)index->num_words, sizeof *index->scratch);
    if (index->id_of_row && index->row_of_id && index->state_of_id && index->count_of_row && index->scratch)
        return (PyObject *)index;
    Py_DECREF(index);
    return PyErr_NoMemory();
}

static PyMethodDef methods[] = {
    {"apply", (PyCFunction)Index_apply, METH_VARARGS, "apply(row, added, removed): the row's worker caches these blocks now."},
    {"reset", (PyCFunction)Index_reset, METH_O, "reset(row): nothing is known of the row's worker."},
    {"count", (PyCFunction)Index_count, METH_O, "count(row) -> blocks that the row's worker is known to cache."},
    {"match", (PyCFunction)Index_match, METH_VARARGS, "match(hashes, out): raise out[row], i32, to the row's leading blocks."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"nbytes", (getter)Index_nbytes, NULL, "memory taken", NULL},
    {"num_blocks", (getter)Index_num_blocks, NULL, "distinct blocks known", NULL},
    {"num_ignored", (getter)Index_num_ignored, NULL, "additions that found no room", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "router._prefix_index.Index",
    .tp_basicsize = sizeof(Index),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "See router/prefix_index.py.",
    .tp_new = Index_new,
    .tp_dealloc = (destructor)Index_dealloc,
    .tp_methods = methods,
    .tp_getset = getters,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "router._prefix_index", .m_doc = "See router/prefix_index.py.", .m_size = -1,
};

PyMODINIT_FUNC PyInit__prefix_index(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddType(module, &type) == 0) return module;
    Py_XDECREF(module);
    return NULL;
}
