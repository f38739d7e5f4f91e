//! A small seeded generator: the same seed gives the same requests on every VM.
//!
//! This file stands alone, so that the checker inside the guest shares it.

/// SplitMix64: one addition and a mix per number, which is good enough for choosing blocks.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns a generator that depends only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `limit`, which must not be 0. The bias of at most `limit` ÷ 2⁶⁴ does not matter here.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

/// Spreads every bit of `value` over all bits.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
