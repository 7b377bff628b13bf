// Attention for every shape and every pair of dtypes, on plain arithmetic: what the tensor-core kernels do
// not serve, float32 above all. No alignment is needed, and any head dimension up to 256.
//
// A thread block takes a (row, query head) at a time. Its warps take the keys in turn, its lanes the
// dimensions: d = lane, lane + 32, ...
#pragma once

constexpr int GENERIC_WARPS = 4;
constexpr int GENERIC_THREADS = 32 * GENERIC_WARPS;
constexpr int GENERIC_DIM = 256;

// The sequence of a row: the last one that begins at or before it and has rows.
DEV int sequence_of(const AttentionParams &p, int row) {
  if (!p.cu_seqlens_q) return row;
  int low = 0, high = p.num_sequences;  // low begins at or before the row, high after it
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (p.cu_seqlens_q[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

DEV float sum_of_warp(float value) {
  for (int mask = 16; mask; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

template <class Q, class KV, unsigned FEATURES>
KERNEL(GENERIC_THREADS, 1) attend_generic(const AttentionParams p) {
  constexpr int ITEMS = GENERIC_DIM / 32;
  SHARED float outs[GENERIC_WARPS][GENERIC_DIM];
  SHARED Running runnings[GENERIC_WARPS];
  int num_heads = p.num_kv_heads * p.group;
  for (int unit = blockIdx.x; unit < p.num_rows * num_heads; unit += gridDim.x) {
    int row = unit / num_heads, head = unit % num_heads, kv_head = head / p.group;
    int sequence = sequence_of(p, row);
    Rows rows = Rows::of(p, sequence);
    Visible visible = Visible::of(p, rows, row - rows.first);
    int position = rows.position(row - rows.first);
    float slope = slope_of<FEATURES>(p, head);
    const Q *q = static_cast<const Q *>(p.q) + row * p.q_row + head * p.q_head;
    const int *table = p.block_table + sequence * p.table_row;

    float query[ITEMS], out[ITEMS];
    for (int i = 0; i < ITEMS; ++i) {
      int d = lane_id() + 32 * i;
      query[i] = d < p.head_dim ? to_float(q[d]) : 0.f;
      out[i] = 0.f;
    }
    Running running = {-INFINITE, 0.f};
    for (int key = visible.begin + warp_id(); key < visible.end; key += GENERIC_WARPS) {
      i64 block = table[key / p.block_size], token = key % p.block_size;
      const KV *k = static_cast<const KV *>(p.k_cache) + block * p.k_block + token * p.k_token +
                    kv_head * p.k_head;
      const KV *v = static_cast<const KV *>(p.v_cache) + block * p.v_block + token * p.v_token +
                    kv_head * p.v_head;
      float product = 0.f;
      for (int i = 0; i < ITEMS; ++i) {
        int d = lane_id() + 32 * i;
        if (d < p.head_dim) product += query[i] * to_float(k[d]);
      }
      product = sum_of_warp(product);
      float factor_of_value = 1.f;
      if constexpr (FEATURES & TOKEN_SCALES) {
        product *= p.k_scales[block * p.k_scale_block + token * p.k_scale_token +
                              kv_head * p.k_scale_head];
        factor_of_value = p.v_scales[block * p.v_scale_block + token * p.v_scale_token +
                                     kv_head * p.v_scale_head];
      }
      float score = score_of<FEATURES>(product, key - position, slope, p);
      float max = max_of(running.max, score), factor = rescale(running.max, max);
      float weight = exp2_fast(score - finite_max(max));
      running = {max, running.sum * factor + weight};
      for (int i = 0; i < ITEMS; ++i) {
        int d = lane_id() + 32 * i;
        if (d < p.head_dim) out[i] = out[i] * factor + weight * factor_of_value * to_float(v[d]);
      }
    }
    for (int i = 0; i < ITEMS; ++i) outs[warp_id()][lane_id() + 32 * i] = out[i];
    if (lane_id() == 0) runnings[warp_id()] = running;
    sync_block();

    Running total = {-INFINITE, 0.f};
    for (const Running &one : runnings) total.max = max_of(total.max, one.max);
    for (const Running &one : runnings) total.sum += one.sum * rescale(one.max, total.max);
    float lse = lse_of(total);
    float weight = total.sum > 0.f ? beside_sink(lse, p.sinks, head) * p.v_scale / total.sum : 0.f;
    for (int d = threadIdx.x; d < p.head_dim; d += GENERIC_THREADS) {
      float value = 0.f;
      for (int w = 0; w < GENERIC_WARPS; ++w) {
        float factor = rescale(runnings[w].max, total.max);
        if (factor > 0.f) value += outs[w][d] * factor;
      }
      static_cast<Q *>(p.out)[i64(unit) * p.head_dim + d] = round_to(value * weight, Q{});
    }
    if (threadIdx.x == 0 && p.lse) p.lse[unit] = lse * LN_2;
    sync_block();
  }
}
