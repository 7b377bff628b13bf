// What all kernels of attention share: which keys a row sees, how a score is made, how partial results
// become one. It knows no loop over keys.
#pragma once

constexpr float LN_2 = 0.69314718055994531f;
constexpr float LOG2_E = 1.4426950408889634f;

// The rows of one sequence in the flat batch.
struct Rows {
  int first, count, length;  // of the sequence's rows in q; `length` counts its keys

  template <class Params>
  static DEV Rows of(const Params &p, int sequence) {
    int first = p.cu_seqlens_q ? p.cu_seqlens_q[sequence] : sequence;
    int count = p.cu_seqlens_q ? p.cu_seqlens_q[sequence + 1] - first : 1;
    return {first, count, p.seq_lens[sequence]};
  }
  // The position of a row; the last row is the last token.
  DEV int position(int row) const { return length - count + row; }
};

// The keys [begin, end) that a row sees.
struct Visible {
  int begin, end;

  template <class Params>
  static DEV Visible of(const Params &p, const Rows &rows, int row) {
    int position = rows.position(row);
    int end = p.causal ? min_of(position + 1, rows.length) : rows.length;
    int begin = p.window_left >= 0 ? max_of(position - p.window_left, 0) : 0;
    return {begin, max_of(end, begin)};
  }
};

// A sum of exp2(score) * value in progress, relative to exp2(max).
struct Running {
  float max, sum;
};

// How much to scale what was relative to `before` to make it relative to `after`; 0 where nothing was.
DEV float rescale(float before, float after) {
  return before == -INFINITE ? 0.f : exp2_fast(before - after);
}

// A finite stand-in for a maximum of no keys, so that exp2(-inf - it) is 0 and not NaN.
DEV float finite_max(float max) { return max == -INFINITE ? 0.f : max; }

DEV float lse_of(Running total) {
  return total.sum > 0.f ? total.max + log2_fast(total.sum) : -INFINITE;
}

// The weight of a normalised result beside the sink of its head, which takes probability and has no
// value. Only `out` feels the sink: the lse stays that of the keys, so that states can be merged.
DEV float beside_sink(float lse, const float *sinks, int head) {
  if (!sinks || lse == -INFINITE) return 1.f;
  return 1.f / (1.f + exp2_fast(sinks[head] * LOG2_E - lse));
}

// The score of one key in base 2, from its dot product with the query row.
template <unsigned FEATURES>
DEV float score_of(float product, int distance, float slope, const AttentionParams &p) {
  float score = product * p.score_scale;
  if constexpr (FEATURES & SOFTCAP) score = p.softcap * tanh_fast(score);
  if constexpr (FEATURES & ALIBI) score += slope * float(distance);
  return score;
}

template <unsigned FEATURES>
DEV float slope_of(const AttentionParams &p, int head) {
  if constexpr (FEATURES & ALIBI) return p.alibi_slopes[head] * LOG2_E;
  return 0.f;
}
