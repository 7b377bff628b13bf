// Cutting a batch into pieces of work, on the device: lengths are read where they lie, nothing goes to
// the host, and the grids that work on a plan are the same for every batch. It knows no attention.
//
//   sequence 0: |----chunk----|----chunk----|--|     splits 0, 1, 2   slots 0, 1, 2, merged in order
//   sequence 1: |--|                                 split 3          the result itself
//   sequence 2 (many rows): query tiles
//
// Chunks begin at multiples of their size, counted from the first token. With a chunk that does not
// depend on the batch, neither does any row's arithmetic.
#pragma once

constexpr int PLAN_THREADS = 256;

// How many splits a sequence has, and its keys [begin, end). One split without keys writes zeros.
struct Cut {
  int begin, end, count;

  static DEV Cut of(const PlanParams &p, const Rows &rows, int chunk) {
    if (rows.count == 0) return {0, 0, 0};
    int begin = Visible::of(p, rows, 0).begin, end = Visible::of(p, rows, rows.count - 1).end;
    if (end <= begin) return {0, 0, 1};
    return {begin, end, (end - 1) / chunk - begin / chunk + 1};
  }
};

// An exclusive prefix sum over the threads of the block; `total` is the sum over all.
DEV int prefix_sum(int value, int &total) {
  SHARED int sums[2][PLAN_THREADS];
  int here = 0, thread = threadIdx.x;
  sums[here][thread] = value;
  sync_block();
  for (int step = 1; step < PLAN_THREADS; step *= 2) {
    int sum = sums[here][thread] + (thread >= step ? sums[here][thread - step] : 0);
    here ^= 1;
    sums[here][thread] = sum;
    sync_block();
  }
  total = sums[here][PLAN_THREADS - 1];
  int before = sums[here][thread] - value;
  sync_block();
  return before;
}

// The chunk that keeps all thread blocks busy for the least time. A split costs its keys and some
// overhead; blocks take splits in rounds.
DEV int choose_chunk(const PlanParams &p) {
  constexpr int OVERHEAD = 64, CANDIDATES = 16;
  constexpr int CHUNKS[CANDIDATES] = {128,  192,  256,  384,  512,  768,   1024,  1536,
                                      2048, 3072, 4096, 6144, 8192, 12288, 16384, 1 << 30};
  SHARED i64 costs[CANDIDATES];
  SHARED int chosen;
  for (int n = warp_id(); n < CANDIDATES; n += PLAN_THREADS / 32) {
    int count = 0, longest = 0;
    for (int s = lane_id(); s < p.num_sequences; s += 32) {
      Rows rows = Rows::of(p, s);
      if (rows.count > p.split_rows) continue;
      Cut cut = Cut::of(p, rows, CHUNKS[n]);
      count += cut.count;
      longest = max_of(longest, min_of(cut.end - cut.begin, CHUNKS[n]));
    }
    for (int mask = 16; mask; mask /= 2) {
      count += shuffle_xor(count, mask);
      longest = max_of(longest, shuffle_xor(longest, mask));
    }
    i64 units = i64(count) * p.num_kv_heads * p.column_tiles;
    i64 rounds = (units + p.num_blocks - 1) / p.num_blocks;
    bool fits = count <= p.max_splits;
    if (lane_id() == 0) costs[n] = fits ? rounds * (longest + OVERHEAD) : i64(1) << 62;
  }
  sync_block();
  if (threadIdx.x == 0) {
    int best = CANDIDATES - 1;
    for (int n = CANDIDATES - 2; n >= 0; --n) {
      if (costs[n] < costs[best]) best = n;
    }
    chosen = CHUNKS[best];
  }
  sync_block();
  return chosen;
}

KERNEL(PLAN_THREADS, 1) plan_batch(const PlanParams p) {
  int chunk = p.chunk ? p.chunk : choose_chunk(p);
  int num_splits = 0, num_slots = 0, num_tiles = 0;
  for (int start = 0; start < p.num_sequences; start += PLAN_THREADS) {
    int s = start + threadIdx.x;
    Rows rows = s < p.num_sequences ? Rows::of(p, s) : Rows{0, 0, 0};
    bool tiled = rows.count > p.split_rows;
    Cut cut = tiled ? Cut{0, 0, 0} : Cut::of(p, rows, chunk);
    int tiles = tiled ? (rows.count * p.group + p.query_tile - 1) / p.query_tile : 0;
    int slots = cut.count > 1 ? cut.count : 0;

    int all_splits, all_slots, all_tiles;
    int split = num_splits + prefix_sum(cut.count, all_splits);
    int slot = num_slots + prefix_sum(slots, all_slots);
    int tile = num_tiles + prefix_sum(tiles, all_tiles);
    if (s < p.num_sequences) {
      p.first_slot[s] = slot;
      p.num_slots[s] = slots;
    }
    // What has no room is dropped: the host has made room for every batch within the plan's limits.
    for (int n = 0; n < cut.count && split + n < p.max_splits; ++n) {
      int first = (cut.begin / chunk + n) * chunk;
      int begin = max_of(cut.begin, first);
      int end = n + 1 == cut.count ? cut.end : first + chunk;
      p.splits[split + n] = {s, begin, end, slots ? slot + n : -1};
    }
    for (int n = 0; n < tiles && tile + n < p.max_query_tiles; ++n) {
      p.query_tiles[tile + n] = {s, n * p.query_tile};
    }
    num_splits += all_splits;
    num_slots += all_slots;
    num_tiles += all_tiles;
  }
  if (threadIdx.x == 0) {
    *p.plan = {min_of(num_splits, p.max_splits), min_of(num_tiles, p.max_query_tiles), chunk, 0};
  }
}
