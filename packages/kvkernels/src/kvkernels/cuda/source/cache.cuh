// What is done to a cache beside attention: new tokens are written, blocks are copied, results merged.
// All of it moves memory; it knows slots and blocks, and not which sequence owns them.
#pragma once

constexpr int CACHE_WARPS = 4;
constexpr int CACHE_THREADS = 32 * CACHE_WARPS;

// The largest number of an 8-bit type.
constexpr float limit_of(int8) { return 127.f; }
constexpr float limit_of(e4m3) { return 448.f; }

DEV float largest_of_warp(float value) {
  for (int mask = 16; mask; mask /= 2) value = max_of(value, shuffle_xor(value, mask));
  return value;
}

// Write new keys and values into their slots. A warp takes a (token, KV head, keys or values) at a time.
template <class Q, class KV, unsigned FEATURES>
KERNEL(CACHE_THREADS, 1) write_tokens(const WriteParams p) {
  constexpr int ITEMS = 8;  // for each lane, of 256 at most
  int num_units = p.num_tokens * p.num_kv_heads * 2;
  for (int unit = blockIdx.x * CACHE_WARPS + warp_id(); unit < num_units;
       unit += gridDim.x * CACHE_WARPS) {
    bool is_key = unit % 2 == 0;
    int head = unit / 2 % p.num_kv_heads, token = unit / 2 / p.num_kv_heads;
    i64 slot = p.slots[token];
    if (slot < 0) continue;
    i64 block = slot / p.block_size, offset = slot % p.block_size;
    const Q *row = is_key ? static_cast<const Q *>(p.k) + token * p.new_k_row + head * p.new_k_head
                          : static_cast<const Q *>(p.v) + token * p.new_v_row + head * p.new_v_head;
    KV *target = is_key ? static_cast<KV *>(p.k_cache) + block * p.k_block + head * p.k_head +
                              offset * p.k_token
                        : static_cast<KV *>(p.v_cache) + block * p.v_block + head * p.v_head +
                              offset * p.v_token;
    float items[ITEMS], largest = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int d = lane_id() + 32 * i;
      items[i] = d < p.head_dim ? to_float(row[d]) : 0.f;
      if constexpr (FEATURES & ROTARY) {
        // The first half of the rotated dimensions pairs with the second.
        int half = p.rotary_dim / 2, angle = d % half;
        if (is_key && d < p.rotary_dim) {
          float cosine = p.cos[i64(token) * half + angle], sine = p.sin[i64(token) * half + angle];
          float other = to_float(row[d < half ? d + half : d - half]);
          items[i] = items[i] * cosine + (d < half ? -other : other) * sine;
        }
      }
      largest = max_of(largest, max_of(items[i], -items[i]));
    }
    float inverse = is_key ? p.k_inverse : p.v_inverse;
    if constexpr (FEATURES & OWN_SCALES) {
      largest = largest_of_warp(largest);
      inverse = largest > 0.f ? limit_of(KV{}) / largest : 0.f;
      float *scale = is_key ? p.k_scales + block * p.k_scale_block + head * p.k_scale_head +
                                  offset * p.k_scale_token
                            : p.v_scales + block * p.v_scale_block + head * p.v_scale_head +
                                  offset * p.v_scale_token;
      if (lane_id() == 0) *scale = largest / limit_of(KV{});
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int d = lane_id() + 32 * i;
      if (d < p.head_dim) target[d] = round_to(items[i] * inverse, KV{});
    }
  }
}

// Copy the first tokens of blocks, in all caches. A thread block takes a (cache, copy) at a time, and
// its threads pieces of BYTES. Sources and destinations may be of two pools, and either may be pinned
// memory of the host: that is far away, so a thread has several pieces under way before it stores one.
constexpr int COPIES_AHEAD = 4;

template <int BYTES>
KERNEL(CACHE_THREADS, 1) copy_tokens(const CopyParams p) {
  int pieces = p.row_bytes / BYTES;
  for (int unit = blockIdx.x; unit < p.num_caches * p.num_copies; unit += gridDim.x) {
    int cache = unit / p.num_copies;
    const int *copy = p.copies + unit % p.num_copies * 3;
    int num_tokens = copy[2];
    const u8 *source = reinterpret_cast<const u8 *>(p.sources[cache]) + copy[0] * p.source_block;
    u8 *target = reinterpret_cast<u8 *>(p.destinations[cache]) + copy[1] * p.destination_block;
    int num_pieces = p.num_kv_heads * num_tokens * pieces;
    for (int first = threadIdx.x; first < num_pieces; first += COPIES_AHEAD * CACHE_THREADS) {
      u32 loaded[COPIES_AHEAD][4];
      u8 *where[COPIES_AHEAD];
#pragma unroll
      for (int n = 0; n < COPIES_AHEAD; ++n) {
        int i = first + n * CACHE_THREADS;
        if (i >= num_pieces) continue;
        int piece = i % pieces, token = i / pieces % num_tokens, head = i / pieces / num_tokens;
        where[n] = target + head * p.destination_head + token * p.destination_token + piece * BYTES;
        load_piece<BYTES>(loaded[n],
                          source + head * p.source_head + token * p.source_token + piece * BYTES);
      }
#pragma unroll
      for (int n = 0; n < COPIES_AHEAD; ++n) {
        if (first + n * CACHE_THREADS < num_pieces) store_piece<BYTES>(where[n], loaded[n]);
      }
    }
  }
}

// Merge results over disjoint keys, in the order given. A warp takes a (row, head) at a time.
template <class Q>
KERNEL(CACHE_THREADS, 1) merge_results(const MergeParams p) {
  for (int unit = blockIdx.x * CACHE_WARPS + warp_id(); unit < p.num_rows * p.num_heads;
       unit += gridDim.x * CACHE_WARPS) {
    float max = -INFINITE, sum = 0.f;
    for (int s = 0; s < p.num_states; ++s) max = max_of(max, p.lses[s][unit] * LOG2_E);
    for (int s = 0; s < p.num_states; ++s) sum += rescale(p.lses[s][unit] * LOG2_E, max);
    float lse = lse_of({max, sum});
    float weight = sum > 0.f ? beside_sink(lse, p.sinks, unit % p.num_heads) / sum : 0.f;
    for (int d = lane_id(); d < p.head_dim; d += 32) {
      float value = 0.f;
      for (int s = 0; s < p.num_states; ++s) {
        float factor = rescale(p.lses[s][unit] * LOG2_E, max);
        const Q *out = static_cast<const Q *>(p.outs[s]);
        if (factor > 0.f) value += factor * to_float(out[i64(unit) * p.head_dim + d]);
      }
      static_cast<Q *>(p.out)[i64(unit) * p.head_dim + d] = round_to(value * weight, Q{});
    }
    if (lane_id() == 0 && p.lse) p.lse[unit] = lse * LN_2;
  }
}
