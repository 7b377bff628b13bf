// The instructions of the GPU that the kernels use, one small function each. This is the only file that
// holds PTX, and it includes no header, so that NVRTC needs no include path. It knows no attention.
//
// The tests compile the other files against another implementation of the same names, for a CPU.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEV __device__ __forceinline__
// A kernel of blocks of `threads`, of which `blocks` shall fit on a multiprocessor at once.
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define INFINITE __int_as_float(0x7f800000)

DEV void sync_block() { __syncthreads(); }
DEV int lane_id() { return threadIdx.x & 31; }
DEV int warp_id() { return threadIdx.x >> 5; }

// ---- numbers -------------------------------------------------------------------------------------

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct e4m3 { u8 bits; };   // one sign, four exponent, three fraction bits; no infinity
struct int8 { signed char value; };

DEV float as_float(u32 bits) { return __uint_as_float(bits); }
DEV u32 as_bits(float value) { return __float_as_uint(value); }

DEV float to_float(float x) { return x; }
DEV float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEV float to_float(int8 x) { return float(x.value); }
DEV float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEV float to_float(e4m3 x) {
#if __CUDA_ARCH__ >= 890
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(x.bits)));
  return to_float(fp16{u16(pair)});
#else
  // The exponent and the fraction, read as fp16, are 2^8 too small.
  float scaled = to_float(fp16{u16((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.f;
  return (x.bits & 0x7f) == 0x7f ? __int_as_float(0x7fffffff) : scaled;
#endif
}

DEV float round_to(float x, float) { return x; }
DEV bf16 round_to(float x, bf16) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(x));
  return {u16(pair)};
}
DEV fp16 round_to(float x, fp16) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
}
// To int8, halves to even; what does not fit becomes -128 or 127, and NaN becomes 0.
DEV int8 round_to(float x, int8) {
  int value;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(value) : "f"(x));
  return {(signed char)value};
}
// To e4m3, halves to even; what does not fit becomes -448 or 448, and NaN stays NaN.
DEV e4m3 round_to(float x, e4m3) {
  u32 bits = as_bits(x), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {u8(sign | 0x7f)};
  if (rest >= 0x43e00000) return {u8(sign | 0x7e)};
  if (rest < 0x3c800000) {  // below the smallest normal, 2^-6: multiples of 2^-9
    return {u8(sign | u32(__float2int_rn(as_float(rest) * 512.f)))};
  }
  rest += 0x7ffff + (rest >> 20 & 1);  // round to three fraction bits
  u32 found = (rest >> 20) - (120 << 3);
  return {u8(sign | (found < 0x7e ? found : 0x7e))};
}

DEV u32 pack(float low, float high, bf16) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEV u32 pack(float low, float high, fp16) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The bytes of `low` are numbered 0 to 3 and those of `high` 4 to 7; each digit of the selector names
// one, the last digit the lowest.
DEV u32 select_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// Two neighbouring 8-bit numbers, the lower or the upper two of a word, as two 16-bit floats; exact.
DEV u32 widen(u32 word, int half, e4m3, fp16) {
#if __CUDA_ARCH__ >= 890
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(word >> 16 * half)));
  return pair;
#else
  fp16 low = round_to(to_float(e4m3{u8(word >> 16 * half)}), fp16{});
  fp16 high = round_to(to_float(e4m3{u8(word >> (16 * half + 8))}), fp16{});
  return low.bits | u32(high.bits) << 16;
#endif
}
DEV u32 widen(u32 word, int half, int8, fp16) {
  // 0x6400 is 1024 in fp16, whose last fraction bit is 1: a byte beside it adds its value.
  u32 biased = select_bytes(word ^ 0x80808080u, 0x64646464u, half ? 0x4342 : 0x4140);
  u32 pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(biased), "r"(0x64806480u));  // 1024 + 128
  return pair;
}
DEV u32 widen(u32 word, int half, int8, bf16) {
  // 0x4300 is 128 in bf16, whose last fraction bit is 1: seven bits add their value, and the sign bit
  // makes it 256.
  u32 bytes = select_bytes(word, 0u, half ? 0x4342 : 0x4140);
  u32 value = (bytes & 0x007f007fu) | 0x43004300u, bias = (bytes & 0x00800080u) | 0x43004300u;
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(bias), "r"(0xbf80bf80u), "r"(value));
  return pair;
}

// ---- arithmetic ----------------------------------------------------------------------------------

DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 - 2 / (1 + e^2x): as exact as the exponential, unlike the instruction for tanh (2^-11).
DEV float tanh_fast(float x) {
  return 1.f - __fdividef(2.f, 1.f + exp2_fast(2.8853900817779268f * x));
}
DEV float max_of(float a, float b) { return fmaxf(a, b); }
DEV int min_of(int a, int b) { return a < b ? a : b; }
DEV int max_of(int a, int b) { return a > b ? a : b; }

// ---- memory --------------------------------------------------------------------------------------

// Load 16, 8, 4 or 2 aligned bytes that are read once and not written by this kernel.
template <int BYTES>
DEV void load_stream(u32* words, const void* source) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(source));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1]) : "l"(source));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(source));
  } else {
    static_assert(BYTES == 2, "a load has 2, 4, 8 or 16 bytes");
    u16 half;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(half) : "l"(source));
    words[0] = half;
  }
}

// A piece of a copy from global memory to global memory: 16 or 2 aligned bytes, or one.
template <int BYTES>
DEV void load_piece(u32 (&piece)[4], const u8* source) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece[0]), "=r"(piece[1]), "=r"(piece[2]), "=r"(piece[3])
                 : "l"(source) : "memory");
  } else if constexpr (BYTES == 2) {
    piece[0] = *reinterpret_cast<const u16*>(source);
  } else {
    static_assert(BYTES == 1, "a piece has 1, 2 or 16 bytes");
    piece[0] = *source;
  }
}
template <int BYTES>
DEV void store_piece(u8* target, const u32 (&piece)[4]) {
  if constexpr (BYTES == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(target), "r"(piece[0]), "r"(piece[1]), "r"(piece[2]), "r"(piece[3])
                 : "memory");
  } else if constexpr (BYTES == 2) {
    *reinterpret_cast<u16*>(target) = u16(piece[0]);
  } else {
    *target = u8(piece[0]);
  }
}

// Copies of 16 aligned bytes to shared memory that complete in groups, in order. Without `valid` the
// bytes become zero and the source is not read.
DEV void copy_async(void* target, const void* source, bool valid) {
  u32 address = u32(__cvta_generic_to_shared(target));
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(address), "l"(source), "r"(bytes) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most N of this thread's newest groups are incomplete.
template <int N>
DEV void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// ---- collectives of a warp: all 32 lanes call them together ---------------------------------------

DEV float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEV int shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEV int shuffle(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Lane l passes the address of row l % 8 of the 8x8 matrix l / 8 of 16-bit items; word i of lane l is the
// items (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix i.
DEV void load_matrices(u32 (&words)[4], const void* row) {
  u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address) : "memory");
}
// The same with every matrix transposed.
DEV void load_matrices_transposed(u32 (&words)[4], const void* row) {
  u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address) : "memory");
}
// Transpose an 8x8 matrix of 16-bit items that the warp holds as load_matrices leaves it.
DEV u32 transpose(u32 word) {
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
  return found;
}

// c[16, 8] += a[16, 16] b[16, 8]. With g = lane / 4 and p = 2 (lane % 4), a lane holds
//   a[0]: (g, p) (g, p+1)   a[1]: (g+8, p) (g+8, p+1)   a[2], a[3]: the same at columns + 8
//   b0: (p, g) (p+1, g)     b1: the same at rows + 8
//   c[0]: (g, p)  c[1]: (g, p+1)  c[2]: (g+8, p)  c[3]: (g+8, p+1)
DEV void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, fp16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
