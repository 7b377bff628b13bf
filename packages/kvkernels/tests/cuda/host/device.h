// The functions of device.cuh for a CPU, so that the other files of the kernels compile unchanged.
//
// Written to find mistakes: copies to shared memory happen when they are waited for, and their target
// holds NaN until then; collectives check that the whole warp takes part; vectors must be aligned.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "fibers.h"

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

#define DEV inline
#define KERNEL(threads, blocks) void
#define SHARED static thread_local
#define DYNAMIC_SHARED(name)              \
  u8 *name = reinterpret_cast<u8 *>(      \
      (reinterpret_cast<uintptr_t>(host::block->shared.data()) + 127) & ~uintptr_t(127))
#define INFINITE INFINITY

struct Index {
  int x;
};
#define threadIdx (Index{host::fiber->thread})
#define blockIdx (Index{int(host::block->index)})
#define gridDim (Index{int(host::block->grid)})

DEV void sync_block() { host::barrier(); }
DEV int lane_id() { return host::fiber->thread % host::WARP; }
DEV int warp_id() { return host::fiber->thread / host::WARP; }

// ---- numbers -------------------------------------------------------------------------------------

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct e4m3 { u8 bits; };
struct int8 { signed char value; };

DEV float as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
DEV u32 as_bits(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

DEV float to_float(float x) { return x; }
DEV float to_float(bf16 x) { return as_float(u32(x.bits) << 16); }
DEV float to_float(fp16 x) { return _cvtsh_ss(x.bits); }
DEV float to_float(int8 x) { return float(x.value); }
DEV float to_float(e4m3 x) {
  int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  if ((x.bits & 0x7f) == 0x7f) return NAN;
  float size = exponent ? ldexpf(float(8 + fraction), exponent - 10) : ldexpf(float(fraction), -9);
  return x.bits & 0x80 ? -size : size;
}

DEV float round_to(float x, float) { return x; }
DEV bf16 round_to(float x, bf16) {
  u32 bits = as_bits(x);
  if (std::isnan(x)) return {0x7fff};
  return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
DEV fp16 round_to(float x, fp16) { return {u16(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }
DEV int8 round_to(float x, int8) {
  if (std::isnan(x)) return {0};
  return {(signed char)(nearbyintf(fminf(fmaxf(x, -128.f), 127.f)))};
}
DEV e4m3 round_to(float x, e4m3) {
  u8 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return {u8(sign | 0x7f)};
  float size = fminf(fabsf(x), 448.f);
  // The spacing of the numbers about `size`: eight steps an octave, and never below 2^-9.
  int exponent = size < ldexpf(1.f, -6) ? -6 : std::ilogb(size);
  int steps = int(nearbyintf(ldexpf(size, 3 - exponent)));
  if (exponent == -6 && steps < 8) return {u8(sign | steps)};
  if (steps == 16) steps = 8, ++exponent;
  return {u8(sign | (exponent + 7) << 3 | (steps - 8))};
}

template <class M>
DEV u32 pack(float low, float high, M) {
  return round_to(low, M{}).bits | u32(round_to(high, M{}).bits) << 16;
}

DEV u32 select_bytes(u32 low, u32 high, u32 selector) {
  u64 bytes = low | u64(high) << 32;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) found |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}

DEV int8 number_of(u8 bits, int8) { return {(signed char)bits}; }
DEV e4m3 number_of(u8 bits, e4m3) { return {bits}; }
template <class KV, class M>
DEV u32 widen(u32 word, int half, KV, M) {
  u8 low = u8(word >> 16 * half), high = u8(word >> (16 * half + 8));
  return pack(to_float(number_of(low, KV{})), to_float(number_of(high, KV{})), M{});
}

// ---- arithmetic ----------------------------------------------------------------------------------

DEV float exp2_fast(float x) { return exp2f(x); }
DEV float log2_fast(float x) { return log2f(x); }
DEV float tanh_fast(float x) { return 1.f - 2.f / (1.f + exp2f(2.8853900817779268f * x)); }
DEV float max_of(float a, float b) { return fmaxf(a, b); }
DEV int min_of(int a, int b) { return a < b ? a : b; }
DEV int max_of(int a, int b) { return a > b ? a : b; }

// ---- memory --------------------------------------------------------------------------------------

DEV void require_aligned(const void *address, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) host::fail("an access is not aligned");
}
template <int BYTES>
DEV void load_stream(u32 *words, const void *source) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4 || BYTES == 2);
  require_aligned(source, BYTES);
  if (BYTES == 2) words[0] = 0;
  memcpy(words, source, BYTES);
}

template <int BYTES>
DEV void load_piece(u32 (&piece)[4], const u8 *source) {
  static_assert(BYTES == 16 || BYTES == 2 || BYTES == 1);
  require_aligned(source, BYTES);
  memcpy(piece, source, BYTES);
}
template <int BYTES>
DEV void store_piece(u8 *target, const u32 (&piece)[4]) {
  require_aligned(target, BYTES);
  memcpy(target, piece, BYTES);
}

DEV void copy_async(void *target, const void *source, bool valid) {
  require_aligned(target, 16);
  if (valid) require_aligned(source, 16);
  memset(target, 0xff, 16);
  host::fiber->copies.push_back({target, source, valid});
}
DEV void commit_copies() {
  host::fiber->groups.push_back(std::move(host::fiber->copies));
  host::fiber->copies.clear();
}
template <int N>
DEV void wait_copies() {
  auto &groups = host::fiber->groups;
  while (int(groups.size()) > N) {
    for (const host::Copy &copy : groups.front()) {
      if (copy.valid) memcpy(copy.target, copy.source, 16);
      else memset(copy.target, 0, 16);
    }
    groups.pop_front();
  }
}

// ---- collectives of a warp -----------------------------------------------------------------------

enum Collective { SHUFFLE, LOAD, LOAD_TRANSPOSED, TRANSPOSE, MULTIPLY };

DEV u32 shuffled(u32 value, int lane) { return host::collect(SHUFFLE, &value, 1)[lane & 31][0]; }
DEV float shuffle_xor(float value, int mask) {
  return as_float(shuffled(as_bits(value), lane_id() ^ mask));
}
DEV int shuffle_xor(int value, int mask) { return int(shuffled(u32(value), lane_id() ^ mask)); }
DEV int shuffle(int value, int lane) { return int(shuffled(u32(value), lane)); }

DEV void load_matrices_of(Collective which, u32 (&words)[4], const void *row) {
  require_aligned(row, 16);
  u32 address[2];
  memcpy(address, &row, 8);
  auto brought = host::collect(which, address, 2);
  int g = lane_id() / 4, pair = lane_id() % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    u16 items[2];
    for (int j = 0; j < 2; ++j) {
      int row_index = which == LOAD ? g : pair + j, column = which == LOAD ? pair + j : g;
      const u16 *source;
      memcpy(&source, brought[matrix * 8 + row_index], 8);
      items[j] = source[column];
    }
    words[matrix] = items[0] | u32(items[1]) << 16;
  }
}
DEV void load_matrices(u32 (&words)[4], const void *row) { load_matrices_of(LOAD, words, row); }
DEV void load_matrices_transposed(u32 (&words)[4], const void *row) {
  load_matrices_of(LOAD_TRANSPOSED, words, row);
}
DEV u32 transpose(u32 word) {
  auto brought = host::collect(TRANSPOSE, &word, 1);
  int g = lane_id() / 4, pair = lane_id() % 4 * 2;
  u32 found = 0;
  for (int j = 0; j < 2; ++j) {
    u32 from = brought[(pair + j) * 4 + g / 2][0];
    found |= (from >> 16 * (g % 2) & 0xffff) << 16 * j;
  }
  return found;
}

template <class M>
DEV float item_of(u32 pair, int which, M) {
  return to_float(M{u16(pair >> 16 * which)});
}
template <class M>
DEV void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, M) {
  u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto brought = host::collect(MULTIPLY, mine, 6);
  int g = lane_id() / 4, t = lane_id() % 4;
  for (int k = 0; k < 16; ++k) {
    int lane = k % 8 / 2, upper = k / 8, which = k % 2;
    const u32 *row = brought[g * 4 + lane];
    float a_low = item_of(row[2 * upper], which, M{});
    float a_high = item_of(row[2 * upper + 1], which, M{});
    for (int j = 0; j < 2; ++j) {
      float b = item_of(brought[(2 * t + j) * 4 + lane][4 + upper], which, M{});
      c[j] += a_low * b;
      c[2 + j] += a_high * b;
    }
  }
}
