// Keys and values as operands of the tensor cores, loaded straight from the cache.
//
// A tile is 16 tokens. Scores are computed transposed, S^T[token, column] = K[token, d] Q^T[d, column],
// and so are results, O^T[d, column] = V^T[d, token] P^T[token, column]: the cache is always the operand
// with 16 rows, and the 8 columns are the query heads that share a KV head. So every key and value is
// read once for its group, and no row of the tensor cores is spent on heads that are not there.
//
// No shared memory is needed. The order of d in the first product is free, as long as Q has the same, and
// so is the order of the rows of the second; a lane thus takes 16 neighbouring bytes of a token wherever
// the head dimension allows, and makes its operands from them.
//
//   keys:   lane (g, t) holds of the tokens g and g + 8 the vector t of 4; a vector of N items feeds
//           N / 4 products over 16 d each
//   values: lane (g, t) holds of the tokens 2t, 2t + 1, 2t + 8 and 2t + 9 the vector g of 8; the items 2i
//           and 2i + 1 of a vector of N are rows g and g + 8 of product i, of N / 2
//
// with g = lane / 4 and t = lane % 4.
#pragma once

constexpr int TILE = 16;

// The items of the longest vector, of at most 16 bytes, that cuts `items` evenly.
template <class KV>
constexpr int vector_of(int items) {
  int length = 16 / int(sizeof(KV));
  while (items % length) length /= 2;
  return length;
}

// The type that the tensor cores multiply: that of a 16-bit cache; 8-bit caches become what holds them
// exactly. Queries are rounded to it where they differ.
template <class Q, class KV> struct Operand { using Type = KV; };
template <class Q> struct Operand<Q, int8> { using Type = Q; };
template <class Q> struct Operand<Q, e4m3> { using Type = fp16; };

template <class KV, int D>
struct Keys {
  static constexpr int VECTOR = vector_of<KV>(D / 4);
  static constexpr int WORDS = VECTOR * sizeof(KV) / 4;
  static constexpr int SEGMENTS = D / (4 * VECTOR);
  static constexpr int PRODUCTS = VECTOR / 4;
  static_assert(D % 16 == 0, "the head dimension must be a multiple of 16");

  u32 words[2][SEGMENTS][WORDS];

  DEV void load(int which, const KV *row) {
    const KV *mine = row + (lane_id() & 3) * VECTOR;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
      load_stream<WORDS * 4>(words[which][s], mine + s * 4 * VECTOR);
    }
  }

  template <class M>
  DEV void operand(int s, int product, u32 (&a)[4], M) const {
    if constexpr (sizeof(KV) == 2) {
      a[0] = words[0][s][2 * product];
      a[1] = words[1][s][2 * product];
      a[2] = words[0][s][2 * product + 1];
      a[3] = words[1][s][2 * product + 1];
    } else {
      a[0] = widen(words[0][s][product], 0, KV{}, M{});
      a[1] = widen(words[1][s][product], 0, KV{}, M{});
      a[2] = widen(words[0][s][product], 1, KV{}, M{});
      a[3] = widen(words[1][s][product], 1, KV{}, M{});
    }
  }
};

// The queries of one tile of 8 columns, in the order of d that Keys has.
template <class Q, class KV, int D>
struct Queries {
  using M = typename Operand<Q, KV>::Type;
  using K = Keys<KV, D>;
  u32 words[K::SEGMENTS][K::PRODUCTS][2];

  // `row` is the query of column g, or null where there is no such column.
  DEV void load(const Q *row) {
#pragma unroll
    for (int s = 0; s < K::SEGMENTS; ++s) {
#pragma unroll
      for (int n = 0; n < 2 * K::PRODUCTS; ++n) {
        int d = (s * 4 + (lane_id() & 3)) * K::VECTOR + 2 * n;
        float low = row ? to_float(row[d]) : 0.f, high = row ? to_float(row[d + 1]) : 0.f;
        words[s][n / 2][n % 2] = pack(low, high, M{});
      }
    }
  }
};

// The values of a tile, or of one of its parts: registers do not hold 256 d of keys, values and sums.
template <class KV, int D>
struct Values {
  static constexpr int LONG = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
  static constexpr int PARTS = D * sizeof(KV) > 256 ? D / LONG : 1;
  static constexpr int VECTOR = vector_of<KV>(D / PARTS / 8);
  static constexpr int BYTES = VECTOR * sizeof(KV);
  static constexpr int SEGMENTS = D / PARTS / (8 * VECTOR);
  static constexpr int PRODUCTS = VECTOR / 2;

  u32 words[4][SEGMENTS][(BYTES + 3) / 4];

  DEV void load(int which, int part, const KV *row) {
    const KV *mine = row + part * (D / PARTS) + (lane_id() >> 2) * VECTOR;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
      load_stream<BYTES>(words[which][s], mine + s * 8 * VECTOR);
    }
  }

  template <class M>
  DEV void operand(int s, int product, u32 (&a)[4], M) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // the tokens 2t and 2t + 1, then 8 later
      if constexpr (sizeof(KV) == 2) {
        u32 first = words[2 * half][s][product], second = words[2 * half + 1][s][product];
        a[2 * half] = select_bytes(first, second, 0x5410);
        a[2 * half + 1] = select_bytes(first, second, 0x7632);
      } else {
        u32 first = words[2 * half][s][product / 2], second = words[2 * half + 1][s][product / 2];
        u32 both = select_bytes(first, second, product % 2 ? 0x7362 : 0x5140);
        a[2 * half] = widen(both, 0, KV{}, M{});
        a[2 * half + 1] = widen(both, 1, KV{}, M{});
      }
    }
  }

  // The d of row g of a product; row g + 8 is the next.
  static DEV int dimension(int part, int s, int product) {
    return part * (D / PARTS) + (s * 8 + (lane_id() >> 2)) * VECTOR + 2 * product;
  }
};
