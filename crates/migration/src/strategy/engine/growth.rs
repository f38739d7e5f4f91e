//! The growth of a volume while it is copied.

use super::Engine;

impl Engine {
    /// Grows the volume. The new part reads as zeroes on both sides, so it is not missing, and a finished pass stays finished.
    pub(super) fn grown(&mut self, size_bytes: u64) {
        let first_pass_is_over = self.is_pass_over();
        self.settings.size_bytes = self.settings.size_bytes.max(size_bytes);
        self.tellings.grow(self.settings.block_size.blocks_of(self.settings.size_bytes));
        self.replica.grow(self.settings.block_size.blocks_of(self.settings.size_bytes));
        if first_pass_is_over {
            self.cursor = self.end();
        }
        self.is_growing = false;
    }
}
