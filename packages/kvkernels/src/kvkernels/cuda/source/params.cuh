// What the kernels of attention are given. Lengths are in items of their array, offsets in 64 bits.
#pragma once

// Features that a specialisation pays for only when it has them.
constexpr unsigned SOFTCAP = 1;       // scores go through softcap * tanh(score / softcap)
constexpr unsigned ALIBI = 2;         // scores get slope * (key position - row position)
constexpr unsigned MANY_ROWS = 4;     // a sequence may have more than one row
constexpr unsigned TOKEN_SCALES = 8;  // an 8-bit cache has one scale for each token and head
constexpr unsigned WHOLE_TILES = 16;  // block_size is a multiple of 16, so a tile lies in one block

// A stretch of one sequence's context: the keys [begin, end) for all of its rows.
struct Split {
  int sequence, begin, end;
  int slot;  // where its partial result goes, or -1 if it is the only split of its sequence
};

// The first words of a plan.
struct PlanHeader {
  int num_splits;       // of sequences that are split over their context
  int num_query_tiles;  // of the sequences with many rows, which are split over their rows
  int chunk;            // keys in a split
  int unused;
};

// A tile of query columns of one sequence with many rows: columns [first, first + size of a tile).
struct QueryTile {
  int sequence, first;
};

struct AttentionParams {
  const void *q, *k_cache, *v_cache;
  const int *block_table, *seq_lens;
  const int *cu_seqlens_q;                 // null: one row for each sequence
  const float *alibi_slopes, *sinks;       // by query head; sinks may be null
  const float *k_scales, *v_scales;        // by block, head and token, with TOKEN_SCALES
  const PlanHeader *plan;
  const Split *splits;
  const int *first_slot;                   // by sequence: the slot of its first split
  const int *num_slots;                    // by sequence: its splits, 1 where no merge is needed
  const QueryTile *query_tiles;
  float *partial_out;                      // [slot, kv head, column, D], normalised
  float *partial_lse;                      // [slot, kv head, column], base 2
  void *out;                               // [T, Hq, D]
  float *lse;                              // [T, Hq], natural; may be null
  i64 q_row, q_head;
  i64 k_block, k_head, k_token;
  i64 v_block, v_head, v_token;
  i64 k_scale_block, k_scale_head, k_scale_token;
  i64 v_scale_block, v_scale_head, v_scale_token;
  i64 table_row;
  int block_size, head_dim, num_sequences, num_rows, num_kv_heads;
  int group;                               // query heads for each KV head
  int columns;                             // (row, head of the group) pairs of a split, at most
  int split_rows;                          // sequences with more rows are tiled over their rows
  int window_left;                         // -1: all keys
  int causal;
  float score_scale;                       // to base-2 scores; with SOFTCAP to the argument of tanh
  float softcap;                           // in base 2
  float v_scale;                           // of all values
};

struct PlanParams {
  const int *seq_lens, *cu_seqlens_q;
  PlanHeader *plan;
  Split *splits;
  int *first_slot, *num_slots;
  QueryTile *query_tiles;
  int num_sequences, num_kv_heads, group;
  int chunk;          // keys in a split; 0 lets the plan choose
  int max_splits;     // room in `splits`
  int num_blocks;     // thread blocks of the grid that works on the plan
  int column_tiles;   // how many times a split's keys are read, for its columns
  int split_rows;
  int query_tile;     // columns of a query tile
  int max_query_tiles;
  int window_left, causal;
};

// Features of writing.
constexpr unsigned ROTARY = 1;          // keys are rotated by their positions
constexpr unsigned OWN_SCALES = 2;      // an 8-bit vector gets the scale of its own largest item

struct WriteParams {
  const void *k, *v;                       // [T, Hkv, D]
  void *k_cache, *v_cache;
  const i64 *slots;                        // by token; -1 writes nothing
  const float *cos, *sin;                  // [T, rotary_dim / 2]
  float *k_scales, *v_scales;              // by block, head and token, with OWN_SCALES
  i64 new_k_row, new_k_head, new_v_row, new_v_head;
  i64 k_block, k_head, k_token;
  i64 v_block, v_head, v_token;
  i64 k_scale_block, k_scale_head, k_scale_token;
  i64 v_scale_block, v_scale_head, v_scale_token;
  int num_tokens, num_kv_heads, head_dim, block_size, rotary_dim;
  float k_inverse, v_inverse;              // what items are multiplied with before they are rounded
};

constexpr int MAX_CACHES = 128;
constexpr int MAX_COPIES = 128;

// Everything by value, 4 KB at most: nothing is uploaded, so nothing must outlive the call.
struct CopyParams {
  u64 sources[128], destinations[128];     // the caches, of one shape and of the strides below
  int copies[384];                         // (source, destination, num_tokens) triples
  i64 source_block, source_head, source_token;  // in bytes
  i64 destination_block, destination_head, destination_token;
  int num_caches, num_copies, num_kv_heads, row_bytes;
};

constexpr int MAX_STATES = 16;

struct MergeParams {
  const void *outs[16];                    // [T, Hq, D] each
  const float *lses[16];                   // [T, Hq] each, natural
  const float *sinks;                      // by query head; may be null
  void *out;
  float *lse;                              // may be null
  int num_states, num_rows, num_heads, head_dim;
};
