// Attention of few rows to a long context, split over the context: decoding, and speculative decoding.
// A memory read that computes: every warp streams tiles of its own through registers, with the next tile's
// keys in flight while it multiplies this one's values, and no barrier in the loop.
//
// A thread block takes a (split, KV head) at a time; its warps take tiles in turn and meet at the end.
#pragma once

constexpr int SPLIT_WARPS = 4;
constexpr int SPLIT_THREADS = 32 * SPLIT_WARPS;

// Where the tokens of a tile lie: one block where tiles are whole, else a block for each lane's token.
template <bool WHOLE>
struct TilePlace {
  int block, offset;

  static DEV TilePlace of(const int *table, int tile, int begin, int end, int block_size) {
    int token = tile * TILE;
    if constexpr (!WHOLE) token = max_of(begin, min_of(token + (lane_id() & 15), end - 1));
    int index = token / block_size;
    return {table[index], token - index * block_size};
  }
  // Where token `n` of the tile lies. All lanes call it together.
  DEV i64 item(int n, i64 block_stride, i64 token_stride) const {
    if constexpr (WHOLE) return block * block_stride + (offset + n) * token_stride;
    return shuffle(block, n) * block_stride + shuffle(offset, n) * token_stride;
  }
};

// The two tokens whose keys, and the four whose values, a lane loads of a tile. Tokens outside the split
// are replaced by its first or last: what lies there is not read, not even to be masked.
template <bool WHOLE>
struct TileLoader {
  const AttentionParams &p;
  int begin, end;

  DEV int inside(int tile, int n) const {
    return max_of(begin, min_of(tile * TILE + n, end - 1)) - tile * TILE;
  }
  template <class KV, int D>
  DEV void keys(Keys<KV, D> &keys, const KV *cache, int tile, TilePlace<WHOLE> place) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int n = inside(tile, (lane_id() >> 2) + 8 * i);
      keys.load(i, cache + place.item(n, p.k_block, p.k_token));
    }
  }
  template <class KV, int D>
  DEV void values(Values<KV, D> &values, const KV *cache, int tile, int part,
                  TilePlace<WHOLE> place) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int n = inside(tile, (lane_id() & 3) * 2 + (i & 1) + (i >> 1) * 8);
      values.load(i, part, cache + place.item(n, p.v_block, p.v_token));
    }
  }
  // The scales of the tokens g and g + 8.
  DEV void scales(float (&k)[2], float (&v)[2], int head, int tile, TilePlace<WHOLE> place) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int n = inside(tile, (lane_id() >> 2) + 8 * i);
      k[i] = p.k_scales[place.item(n, p.k_scale_block, p.k_scale_token) + head * p.k_scale_head];
      v[i] = p.v_scales[place.item(n, p.v_scale_block, p.v_scale_token) + head * p.v_scale_head];
    }
  }
};

// What a lane knows of its two columns in each tile of 8: columns 2t and 2t + 1.
template <int TILES, unsigned FEATURES>
struct Columns {
  Visible visible[TILES][2];
  int position[TILES][2];
  float slope[TILES][2];

  DEV void load(const AttentionParams &p, const Rows &rows, int kv_head, int first) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = first + n * 8 + (lane_id() & 3) * 2 + j;
        int row = FEATURES & MANY_ROWS ? min_of(column / p.group, rows.count - 1) : 0;
        visible[n][j] = Visible::of(p, rows, row);
        position[n][j] = rows.position(row);
        slope[n][j] = slope_of<FEATURES>(p, kv_head * p.group + column % p.group);
      }
    }
  }
};

// A warp's part of a split: softmax statistics and sums for its columns.
template <class Q, class KV, int D, int TILES, unsigned FEATURES>
struct SplitWarp {
  using M = typename Operand<Q, KV>::Type;
  static constexpr bool WHOLE = FEATURES & WHOLE_TILES;
  using K = Keys<KV, D>;
  using V = Values<KV, D>;

  Queries<Q, KV, D> queries[TILES];
  static constexpr int SEGMENTS = V::PARTS * V::SEGMENTS;
  float out[TILES][SEGMENTS][V::PRODUCTS][4];
  Running running[TILES][2];

  DEV void clear() {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      running[n][0] = running[n][1] = {-INFINITE, 0.f};
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) {
#pragma unroll
        for (int i = 0; i < V::PRODUCTS; ++i) {
          out[n][s][i][0] = out[n][s][i][1] = out[n][s][i][2] = out[n][s][i][3] = 0.f;
        }
      }
    }
  }

  DEV void multiply_keys(float (&scores)[TILES][4], const K &keys) const {
#pragma unroll
    for (int n = 0; n < TILES; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.f;
#pragma unroll
    for (int s = 0; s < K::SEGMENTS; ++s) {
#pragma unroll
      for (int i = 0; i < K::PRODUCTS; ++i) {
        u32 a[4];
        keys.operand(s, i, a, M{});
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          multiply_add(scores[n], a, queries[n].words[s][i][0], queries[n].words[s][i][1], M{});
        }
      }
    }
  }

  // Turn scores into weights relative to the new maxima, and what was summed so far with them.
  DEV void weigh(float (&scores)[TILES][4], const Columns<TILES, FEATURES> &columns, int tile,
                 Visible split, const float (&k_scales)[2], const AttentionParams &p) {
    int token = tile * TILE + (lane_id() >> 2);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Visible visible = split;
        if constexpr (FEATURES & MANY_ROWS) {
          visible.begin = max_of(visible.begin, columns.visible[n][j].begin);
          visible.end = min_of(visible.end, columns.visible[n][j].end);
        }
        float max = running[n][j].max;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int key = token + 8 * i;
          float product = scores[n][j + 2 * i];
          if constexpr (FEATURES & TOKEN_SCALES) product *= k_scales[i];
          int distance = key - columns.position[n][j];
          float score = score_of<FEATURES>(product, distance, columns.slope[n][j], p);
          score = key >= visible.begin && key < visible.end ? score : -INFINITE;
          scores[n][j + 2 * i] = score;
          max = max_of(max, score);
        }
        max = max_of(max, shuffle_xor(max, 4));
        max = max_of(max, shuffle_xor(max, 8));
        max = max_of(max, shuffle_xor(max, 16));
        float factor = rescale(running[n][j].max, max), base = finite_max(max);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scores[n][j + 2 * i] = exp2_fast(scores[n][j + 2 * i] - base);
          sum += scores[n][j + 2 * i];
        }
        running[n][j] = {max, running[n][j].sum * factor + sum};
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
#pragma unroll
          for (int i = 0; i < V::PRODUCTS; ++i) {
            out[n][s][i][j] *= factor;
            out[n][s][i][j + 2] *= factor;
          }
        }
      }
    }
  }

  // The weights as operands, and with TOKEN_SCALES what their values are scaled with.
  DEV void pack_weights(u32 (&b)[TILES][2], const float (&weights)[TILES][4],
                        const float (&v_scales)[2]) const {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float factor = FEATURES & TOKEN_SCALES ? v_scales[i] : 1.f;
        b[n][i] = transpose(pack(weights[n][2 * i] * factor, weights[n][2 * i + 1] * factor, M{}));
      }
    }
  }

  DEV void multiply_values(const u32 (&b)[TILES][2], const V &values, int part) {
#pragma unroll
    for (int s = 0; s < V::SEGMENTS; ++s) {
#pragma unroll
      for (int i = 0; i < V::PRODUCTS; ++i) {
        u32 a[4];
        values.operand(s, i, a, M{});
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          multiply_add(out[n][part * V::SEGMENTS + s][i], a, b[n][0], b[n][1], M{});
        }
      }
    }
  }

  // Stream the tiles warp, warp + SPLIT_WARPS, ... of the keys [split.begin, split.end).
  DEV void attend(const AttentionParams &p, const int *table, int kv_head, Visible split,
                  const Columns<TILES, FEATURES> &columns) {
    const KV *k_cache = static_cast<const KV *>(p.k_cache) + kv_head * p.k_head;
    const KV *v_cache = static_cast<const KV *>(p.v_cache) + kv_head * p.v_head;
    TileLoader<WHOLE> loader{p, split.begin, split.end};
    K keys;
    V values;
    float k_scales[2], v_scales[2], next_k_scales[2], next_v_scales[2];
    auto place_of = [&](int tile) {
      return TilePlace<WHOLE>::of(table, tile, split.begin, split.end, p.block_size);
    };
    int tile = split.begin / TILE + warp_id(), last = (split.end - 1) / TILE;
    if (split.end <= split.begin || tile > last) return;
    TilePlace<WHOLE> next = place_of(tile);
    loader.keys(keys, k_cache, tile, next);
    loader.values(values, v_cache, tile, 0, next);
    if constexpr (FEATURES & TOKEN_SCALES) loader.scales(k_scales, v_scales, kv_head, tile, next);
    TilePlace<WHOLE> here = next;
    if (tile + SPLIT_WARPS <= last) next = place_of(tile + SPLIT_WARPS);
    for (; tile <= last; tile += SPLIT_WARPS) {
      int ahead = tile + SPLIT_WARPS;
      float scores[TILES][4];
      multiply_keys(scores, keys);
      if (ahead <= last) {
        loader.keys(keys, k_cache, ahead, next);
        if constexpr (FEATURES & TOKEN_SCALES) {
          loader.scales(next_k_scales, next_v_scales, kv_head, ahead, next);
        }
      }
      weigh(scores, columns, tile, split, k_scales, p);
      u32 weights[TILES][2];
      pack_weights(weights, scores, v_scales);
#pragma unroll
      for (int part = 0; part < V::PARTS; ++part) {
        if (part > 0) loader.values(values, v_cache, tile, part, here);
        multiply_values(weights, values, part);
      }
      if (ahead <= last) loader.values(values, v_cache, ahead, 0, next);
      here = next;
      if (ahead + SPLIT_WARPS <= last) next = place_of(ahead + SPLIT_WARPS);
      if constexpr (FEATURES & TOKEN_SCALES) {
#pragma unroll
        for (int i = 0; i < 2; ++i) k_scales[i] = next_k_scales[i], v_scales[i] = next_v_scales[i];
      }
    }
  }
};

// The warps' results in shared memory, and their sum.
template <int D, int TILES>
struct SplitMeeting {
  static constexpr int COLUMNS = 8 * TILES, PITCH = D + 4;
  static constexpr int BYTES = SPLIT_WARPS * COLUMNS * (PITCH * 4 + 8);

  float *out;        // [warp, column, PITCH]
  Running *running;  // [warp, column]

  DEV SplitMeeting(u8 *shared)
      : out(reinterpret_cast<float *>(shared)),
        running(reinterpret_cast<Running *>(shared + SPLIT_WARPS * COLUMNS * PITCH * 4)) {}

  template <class Warp>
  DEV void bring(const Warp &warp) {
    int first = warp_id() * COLUMNS;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = first + n * 8 + (lane_id() & 3) * 2 + j;
        float sum = warp.running[n][j].sum;
        sum += shuffle_xor(sum, 4);
        sum += shuffle_xor(sum, 8);
        sum += shuffle_xor(sum, 16);
        if (lane_id() < 4) running[column] = {warp.running[n][j].max, sum};
#pragma unroll
        for (int s = 0; s < Warp::SEGMENTS; ++s) {
#pragma unroll
          for (int i = 0; i < Warp::V::PRODUCTS; ++i) {
            constexpr int IN_PART = Warp::V::SEGMENTS;
            int d = Warp::V::dimension(s / IN_PART, s % IN_PART, i);
            float *target = out + column * PITCH + d;
            target[0] = warp.out[n][s][i][j];
            target[1] = warp.out[n][s][i][j + 2];
          }
        }
      }
    }
  }

  DEV Running total(int column) const {
    float max = -INFINITE, sum = 0.f;
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; ++w) max = max_of(max, running[w * COLUMNS + column].max);
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; ++w) {
      Running one = running[w * COLUMNS + column];
      sum += one.sum * rescale(one.max, max);
    }
    return {max, sum};
  }
  DEV float value(int column, int d, Running total) const {
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; ++w) {
      float factor = rescale(running[w * COLUMNS + column].max, total.max);
      value += out[(w * COLUMNS + column) * PITCH + d] * factor;
    }
    return total.sum > 0.f ? value / total.sum : 0.f;
  }
};

// Thread blocks that shall share a multiprocessor: as many as the registers of their sums let.
constexpr int split_blocks(int items) { return items <= 64 ? 4 : items <= 128 ? 3 : 2; }

template <class Q, class KV, int D, int TILES, unsigned FEATURES>
KERNEL(SPLIT_THREADS, split_blocks(D * TILES)) attend_split(const AttentionParams p) {
  DYNAMIC_SHARED(shared);
  SplitMeeting<D, TILES> meeting(shared);
  constexpr int COLUMNS = 8 * TILES;
  int column_tiles = (p.columns + COLUMNS - 1) / COLUMNS;
  int num_units = p.plan->num_splits * p.num_kv_heads * column_tiles;
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    Split split = p.splits[unit / (p.num_kv_heads * column_tiles)];
    int kv_head = unit / column_tiles % p.num_kv_heads;
    int first = unit % column_tiles * COLUMNS;
    Rows rows = Rows::of(p, split.sequence);
    int num_columns = min_of(rows.count * p.group - first, COLUMNS);
    if (num_columns <= 0) continue;

    SplitWarp<Q, KV, D, TILES, FEATURES> warp;
    Columns<TILES, FEATURES> columns;
    columns.load(p, rows, kv_head, first);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      int column = n * 8 + (lane_id() >> 2), in_group = (first + column) % p.group;
      int row = (first + column) / p.group;
      const Q *q = static_cast<const Q *>(p.q) + (rows.first + row) * p.q_row +
                   (kv_head * p.group + in_group) * p.q_head;
      warp.queries[n].load(column < num_columns ? q : nullptr);
    }
    warp.clear();
    const int *table = p.block_table + split.sequence * p.table_row;
    warp.attend(p, table, kv_head, {split.begin, split.end}, columns);
    meeting.bring(warp);
    sync_block();
    for (int i = threadIdx.x; i < num_columns * D; i += SPLIT_THREADS) {
      int column = i / D, d = i % D, row = (first + column) / p.group;
      int head = kv_head * p.group + (first + column) % p.group;
      Running total = meeting.total(column);
      float value = meeting.value(column, d, total) * p.v_scale, lse = lse_of(total);
      if (split.slot < 0) {
        i64 target = i64(rows.first + row) * p.num_kv_heads * p.group + head;
        value *= beside_sink(lse, p.sinks, head);
        static_cast<Q *>(p.out)[target * D + d] = round_to(value, Q{});
        if (d == 0 && p.lse) p.lse[target] = lse * LN_2;
      } else {
        i64 target = (i64(split.slot) * p.num_kv_heads + kv_head) * p.columns + first + column;
        p.partial_out[target * D + d] = value;
        if (d == 0) p.partial_lse[target] = lse;
      }
    }
    sync_block();
  }
}

// Merge the partial results of split sequences, in the order of their splits. A thread block takes a
// (sequence, row, head) at a time.
template <class Q>
KERNEL(128, 1) merge_splits(const AttentionParams p) {
  int num_heads = p.num_kv_heads * p.group, max_rows = p.columns / p.group;
  int num_units = p.num_sequences * max_rows * num_heads;
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    int head = unit % num_heads, row = unit / num_heads % max_rows;
    int sequence = unit / num_heads / max_rows;
    int count = p.num_slots[sequence];
    Rows rows = Rows::of(p, sequence);
    if (count == 0 || row >= rows.count) continue;
    i64 step = i64(p.num_kv_heads) * p.columns;
    i64 first = p.first_slot[sequence] * step + i64(head / p.group) * p.columns + row * p.group +
                head % p.group;
    float max = -INFINITE, sum = 0.f;
    for (int s = 0; s < count; ++s) max = max_of(max, p.partial_lse[first + s * step]);
    for (int s = 0; s < count; ++s) sum += rescale(p.partial_lse[first + s * step], max);
    float lse = lse_of({max, sum});
    float weight = sum > 0.f ? beside_sink(lse, p.sinks, head) / sum : 0.f;
    i64 target = i64(rows.first + row) * num_heads + head;
    for (int d = threadIdx.x; d < p.head_dim; d += 128) {
      float value = 0.f;
      for (int s = 0; s < count; ++s) {
        float factor = rescale(p.partial_lse[first + s * step], max);
        if (factor > 0.f) value += factor * p.partial_out[(first + s * step) * p.head_dim + d];
      }
      static_cast<Q *>(p.out)[target * p.head_dim + d] = round_to(value * weight, Q{});
    }
    if (threadIdx.x == 0 && p.lse) p.lse[target] = lse * LN_2;
  }
}
