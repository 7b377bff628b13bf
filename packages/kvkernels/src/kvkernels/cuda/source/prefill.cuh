// Attention of many rows: prompts, and chunks of them. It computes more than it reads, so keys and values go
// through shared memory once for all warps of a thread block, and the rows are those of the tensor cores.
//
// A thread block takes a (tile of 64 query columns, KV head) at a time. A column is a (row, head of the
// group) pair, so that heads that share keys share their copies too. Each warp has 16 columns and goes
// through the keys a tile at a time:
//
//   copy keys n | S = Q K^T | copy keys n+1 ---------------------------------|
//   copy values n ----------|  weights of S      | O += S V | copy values n+1 ...
#pragma once

constexpr int PREFILL_WARPS = 4;
constexpr int PREFILL_THREADS = 32 * PREFILL_WARPS;
constexpr int QUERY_COLUMNS = 16 * PREFILL_WARPS;
constexpr int MAX_PREFILL_KEYS = 64;

// Keys of a tile: fewer where the sums of a long head leave few registers for scores.
constexpr int prefill_keys(int head_dim) { return head_dim <= 128 ? MAX_PREFILL_KEYS : 32; }

// Keys or values of a tile in shared memory. Rows are an odd number of 16-byte pieces apart, so that the
// eight rows of a matrix lie in different banks.
template <class KV, int D>
struct SharedTile {
  static constexpr int PIECES = D * sizeof(KV) / 16;
  static constexpr int PITCH = (PIECES | 1) * 16;
  static constexpr int KEYS = prefill_keys(D);
  static constexpr int BYTES = KEYS * PITCH;
  u8 *bytes;

  DEV u8 *piece(int row, int piece) const { return bytes + row * PITCH + piece * 16; }
};

// What the threads of a block share beside keys and values, for the tile that is being copied and the one
// before it.
struct TileTokens {
  int block[2][MAX_PREFILL_KEYS], offset[2][MAX_PREFILL_KEYS];
  float k_scale[2][MAX_PREFILL_KEYS], v_scale[2][MAX_PREFILL_KEYS];

  // Look up where the keys of a tile lie; -1 where the tile has no key.
  template <int KEYS, unsigned FEATURES>
  DEV void look_up(const AttentionParams &p, const int *table, int kv_head, int tile, Visible keys) {
    int n = threadIdx.x, side = tile & 1;
    if (n >= KEYS) return;
    int key = tile * KEYS + n;
    bool valid = key >= keys.begin && key < keys.end;
    i64 where = valid ? table[key / p.block_size] : -1;
    i64 token = key % p.block_size;
    block[side][n] = int(where);
    offset[side][n] = int(token);
    if constexpr (FEATURES & TOKEN_SCALES) {
      i64 k = where * p.k_scale_block + token * p.k_scale_token + kv_head * p.k_scale_head;
      i64 v = where * p.v_scale_block + token * p.v_scale_token + kv_head * p.v_scale_head;
      k_scale[side][n] = valid ? p.k_scales[k] : 0.f;
      v_scale[side][n] = valid ? p.v_scales[v] : 0.f;
    }
  }

  // Begin to copy the rows of a tile, of keys or of values. What is no key becomes zero.
  template <class KV, int D>
  DEV void copy(SharedTile<KV, D> target, const KV *cache, int tile, i64 block_stride,
                i64 token_stride) const {
    constexpr int PIECES = SharedTile<KV, D>::PIECES, KEYS = SharedTile<KV, D>::KEYS;
    for (int i = threadIdx.x; i < KEYS * PIECES; i += PREFILL_THREADS) {
      int row = i / PIECES, piece = i % PIECES;
      i64 where = block[tile & 1][row];
      const KV *source = cache + where * block_stride + offset[tile & 1][row] * token_stride;
      copy_async(target.piece(row, piece), source + piece * int(16 / sizeof(KV)), where >= 0);
    }
    commit_copies();
  }
};

// The queries of a warp as operands: in registers, or for long heads, whose sums fill those, in shared memory
// as the lane will want them.
template <int D>
struct HeldQueries {
  static constexpr int STEPS = D / 16;
  static constexpr bool PARKED = D > 128;
  static constexpr int BYTES = PARKED ? PREFILL_WARPS * STEPS * 4 * 32 * 4 : 0;
  u32 words[PARKED ? 1 : STEPS][4];
  u32 *parked;  // [step][word][lane]

  DEV explicit HeldQueries(u8 *shared)
      : parked(reinterpret_cast<u32 *>(shared) + warp_id() * STEPS * 4 * 32 + lane_id()) {}
  DEV u32 &word(int step, int i) {
    if constexpr (PARKED) return parked[(step * 4 + i) * 32];
    else return words[step][i];
  }
  DEV void operand(int step, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word(step, i);
  }
};

// A warp's 16 query columns. Lane (g, t) has to do with the columns g and g + 8.
template <class Q, class KV, int D, unsigned FEATURES>
struct PrefillWarp {
  using M = typename Operand<Q, KV>::Type;
  static constexpr int STEPS = D / 16, KEYS = prefill_keys(D), KEY_TILES = KEYS / 8;

  HeldQueries<D> queries;
  float out[2 * STEPS][4];
  Running running[2];
  Visible visible[2];
  int position[2];
  float slope[2];

  DEV explicit PrefillWarp(u8 *shared) : queries(shared) {}

  // Columns past the last one repeat it; they are not stored.
  DEV void load(const AttentionParams &p, const Rows &rows, int kv_head, int first) {
    int t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int column = min_of(first + (lane_id() >> 2) + 8 * i, rows.count * p.group - 1);
      int row = column / p.group, head = kv_head * p.group + column % p.group;
      visible[i] = Visible::of(p, rows, row);
      position[i] = rows.position(row);
      slope[i] = slope_of<FEATURES>(p, head);
      running[i] = {-INFINITE, 0.f};
      const Q *q = static_cast<const Q *>(p.q) + (rows.first + row) * p.q_row + head * p.q_head;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // An 8-bit matrix hands a lane four neighbours, so the order of d follows that.
          int d = s * 16 + (sizeof(KV) == 1 ? 4 * t + 2 * half : 2 * t + 8 * half);
          queries.word(s, 2 * half + i) = pack(to_float(q[d]), to_float(q[d + 1]), M{});
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * STEPS; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
  }

  DEV void multiply_keys(float (&scores)[KEY_TILES][4], SharedTile<KV, D> keys) {
    int lane = lane_id();
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.f;
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 a[4];
      queries.operand(s, a);
      if constexpr (sizeof(KV) == 2) {
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) {
          u32 b[4];  // two tiles of keys, both halves of d
          int row = n * 8 + (lane & 7) + (lane >> 4) * 8;
          load_matrices(b, keys.piece(row, 2 * s + (lane >> 3 & 1)));
          multiply_add(scores[n], a, b[0], b[1], M{});
          multiply_add(scores[n + 1], a, b[2], b[3], M{});
        }
      } else {
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 4) {
          u32 b[4];  // four tiles of keys
          load_matrices(b, keys.piece(n * 8 + lane, s));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            u32 low = widen(b[i], 0, KV{}, M{}), high = widen(b[i], 1, KV{}, M{});
            multiply_add(scores[n + i], a, low, high, M{});
          }
        }
      }
    }
  }

  // Turn products into weights relative to the new maxima, and what was summed so far with them.
  DEV void weigh(float (&scores)[KEY_TILES][4], const AttentionParams &p, const TileTokens &tokens,
                 int tile, bool is_whole) {
    int t2 = (lane_id() & 3) * 2, side = tile & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float max = running[i].max;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float product = scores[n][2 * i + j];
          int key = tile * KEYS + n * 8 + t2 + j;
          if constexpr (FEATURES & TOKEN_SCALES) product *= tokens.k_scale[side][n * 8 + t2 + j];
          float score = score_of<FEATURES>(product, key - position[i], slope[i], p);
          bool sees = is_whole || (key >= visible[i].begin && key < visible[i].end);
          scores[n][2 * i + j] = sees ? score : -INFINITE;
          max = max_of(max, scores[n][2 * i + j]);
        }
      }
      max = max_of(max, shuffle_xor(max, 1));
      max = max_of(max, shuffle_xor(max, 2));
      float factor = rescale(running[i].max, max), base = finite_max(max), sum = 0.f;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float weight = exp2_fast(scores[n][2 * i + j] - base);
          sum += weight;
          if constexpr (FEATURES & TOKEN_SCALES) weight *= tokens.v_scale[side][n * 8 + t2 + j];
          scores[n][2 * i + j] = weight;
        }
      }
      running[i] = {max, running[i].sum * factor + sum};
#pragma unroll
      for (int n = 0; n < 2 * STEPS; ++n) {
        out[n][2 * i] *= factor;
        out[n][2 * i + 1] *= factor;
      }
    }
  }

  DEV void multiply_values(const float (&weights)[KEY_TILES][4], SharedTile<KV, D> values) {
    int lane = lane_id();
    u32 a[KEY_TILES / 2][4];
#pragma unroll
    for (int k = 0; k < KEY_TILES / 2; ++k) {  // the sums of one product are the operand of the next
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *pair = weights[2 * k + i / 2] + i % 2 * 2;
        a[k][i] = pack(pair[0], pair[1], M{});
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if constexpr (sizeof(KV) == 2) {
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; ++k) {
          u32 b[4];  // both halves of 16 keys, two tiles of d
          int row = k * 16 + (lane & 15);
          load_matrices_transposed(b, values.piece(row, 2 * s + (lane >> 4)));
          multiply_add(out[2 * s], a[k], b[0], b[1], M{});
          multiply_add(out[2 * s + 1], a[k], b[2], b[3], M{});
        }
      } else {
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; k += 2) {
          u32 b[4];  // both halves of 32 keys; of each pair of d, one is in either tile
          load_matrices_transposed(b, values.piece(k * 16 + lane, s));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[i] = select_bytes(b[i], 0u, 0x3120);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            u32 low = widen(b[2 * i], 0, KV{}, M{}), low_8 = widen(b[2 * i + 1], 0, KV{}, M{});
            u32 high = widen(b[2 * i], 1, KV{}, M{}), high_8 = widen(b[2 * i + 1], 1, KV{}, M{});
            multiply_add(out[2 * s], a[k + i], low, low_8, M{});
            multiply_add(out[2 * s + 1], a[k + i], high, high_8, M{});
          }
        }
      }
    }
  }

  DEV void store(const AttentionParams &p, const Rows &rows, int kv_head, int first) const {
    int t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = running[i].sum;
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      int column = first + (lane_id() >> 2) + 8 * i;
      if (column >= rows.count * p.group) continue;
      int row = column / p.group, head = kv_head * p.group + column % p.group;
      i64 target = i64(rows.first + row) * p.num_kv_heads * p.group + head;
      float lse = lse_of({running[i].max, sum});
      float weight = sum > 0.f ? beside_sink(lse, p.sinks, head) * p.v_scale / sum : 0.f;
      Q *where = static_cast<Q *>(p.out) + target * D;
#pragma unroll
      for (int n = 0; n < 2 * STEPS; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int d = sizeof(KV) == 2 ? n * 8 + 2 * t + j : n / 2 * 16 + 4 * t + 2 * j + n % 2;
          where[d] = round_to(sum > 0.f ? out[n][2 * i + j] * weight : 0.f, Q{});
        }
      }
      if (t == 0 && p.lse) p.lse[target] = lse * LN_2;
    }
  }
};

template <class Q, class KV, int D, unsigned FEATURES>
KERNEL(PREFILL_THREADS, D <= 128 ? 2 : 1) attend_prefill(const AttentionParams p) {
  DYNAMIC_SHARED(shared);
  SHARED TileTokens tokens;
  SharedTile<KV, D> keys{shared}, values{shared + SharedTile<KV, D>::BYTES};
  constexpr int KEYS = prefill_keys(D);
  int num_units = p.plan->num_query_tiles * p.num_kv_heads;
  for (int n = blockIdx.x; n < num_units; n += gridDim.x) {
    int unit = num_units - 1 - n;  // with causal attention the last tiles have the most keys
    QueryTile query_tile = p.query_tiles[unit / p.num_kv_heads];
    int kv_head = unit % p.num_kv_heads;
    Rows rows = Rows::of(p, query_tile.sequence);
    int first = query_tile.first, past = min_of(first + QUERY_COLUMNS, rows.count * p.group);
    Visible of_first = Visible::of(p, rows, first / p.group);
    Visible of_last = Visible::of(p, rows, (past - 1) / p.group);
    Visible seen = {of_first.begin, of_last.end};  // by any of the tile's columns
    const int *table = p.block_table + query_tile.sequence * p.table_row;
    const KV *k_cache = static_cast<const KV *>(p.k_cache) + kv_head * p.k_head;
    const KV *v_cache = static_cast<const KV *>(p.v_cache) + kv_head * p.v_head;

    PrefillWarp<Q, KV, D, FEATURES> warp(shared + 2 * SharedTile<KV, D>::BYTES);
    warp.load(p, rows, kv_head, first + warp_id() * 16);
    int tile = seen.begin / KEYS, last = (seen.end - 1) / KEYS;
    if (seen.end <= seen.begin) last = tile - 1;
    tokens.look_up<KEYS, FEATURES>(p, table, kv_head, tile, seen);
    sync_block();
    if (tile <= last) tokens.copy(keys, k_cache, tile, p.k_block, p.k_token);
    for (; tile <= last; ++tile) {
      tokens.copy(values, v_cache, tile, p.v_block, p.v_token);
      if (tile < last) tokens.look_up<KEYS, FEATURES>(p, table, kv_head, tile + 1, seen);
      wait_copies<1>();
      sync_block();
      float scores[KEYS / 8][4];
      warp.multiply_keys(scores, keys);
      sync_block();
      if (tile < last) tokens.copy(keys, k_cache, tile + 1, p.k_block, p.k_token);
      int begin = tile * KEYS, end = begin + KEYS;
      warp.weigh(scores, p, tokens, tile, begin >= of_last.begin && end <= of_first.end);
      if (tile < last) wait_copies<1>();
      else wait_copies<0>();
      sync_block();
      warp.multiply_values(scores, values);
      sync_block();
    }
    warp.store(p, rows, kv_head, first + warp_id() * 16);
    sync_block();
  }
}
