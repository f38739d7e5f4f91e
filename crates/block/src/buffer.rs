//! The memory of a request, behind one type.
//!
//! A [`Buffer`] is a window into page-aligned memory that several handles may share: a mirrored write goes to two stores from one
//! buffer. The memory lives until the last handle is dropped, and then goes back to its [`BufferPool`]. So a kernel that still
//! works on a request whose future was dropped never sees it freed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Page size of the memory behind buffers, in bytes: the strictest alignment of direct I/O.
pub const PAGE: usize = 4096;

/// Pages of the largest buffer that a pool keeps: 1 MiB, the mover's largest chunk with many in flight. Larger ones
/// are freed at once.
const POOLED_PAGES_MAX: usize = 256;
/// Free buffers that a pool keeps for each size: as many as a busy guest has requests in flight.
const POOLED_BUFFERS_MAX: usize = 128;
/// Free pages that a pool keeps for each size (8 MiB), so that a burst of large requests does not keep its memory.
const POOLED_PAGES_TOTAL_MAX: usize = 2048;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// A window of bytes in shared, page-aligned memory.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<Memory>,
    start: usize,
    length: usize,
}

struct Memory {
    pages: Vec<Page>,
    /// The free lists that the pages return to; `None`: they are freed.
    pool: Option<Arc<FreeLists>>,
    /// Index under which the pool's owner registered the pages with the kernel, if it did.
    registration: Option<u16>,
}

impl Buffer {
    /// Makes a buffer of `length` zero bytes outside any pool.
    pub fn zeroed(length: usize) -> Self {
        let pages = bytemuck::zeroed_vec(length.div_ceil(PAGE));
        Self { memory: Arc::new(Memory { pages, pool: None, registration: None }), start: 0, length }
    }

    /// Makes a buffer that holds a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.fill_from(bytes);
        buffer
    }

    /// Returns the number of bytes in the window.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the window is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the bytes of the window.
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.memory.pages)[self.start..self.start + self.length]
    }

    /// Returns the bytes of the window for writing, or `None` while another handle shares the memory.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let (start, end) = (self.start, self.start + self.length);
        let memory = Arc::get_mut(&mut self.memory)?;
        Some(&mut bytemuck::cast_slice_mut(&mut memory.pages)[start..end])
    }

    /// Returns whether this is the only handle to its memory: only then can it be read into.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }

    /// Copies `bytes` to the start of the window. A shared buffer is first replaced by a private one, so other
    /// handles keep their content.
    pub fn fill_from(&mut self, bytes: &[u8]) {
        if !self.is_unique() {
            let mut private = Self::zeroed(self.length);
            if let Some(target) = private.as_mut_slice() {
                target.copy_from_slice(self.as_slice());
            }
            *self = private;
        }
        if let Some(target) = self.as_mut_slice() {
            target[..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Returns another handle to `length` bytes of this window, from `start` on.
    ///
    /// # Panics
    /// If the part does not lie within the window.
    pub fn slice(&self, start: usize, length: usize) -> Self {
        assert!(start + length <= self.length, "a slice lies within its buffer");
        Self { memory: Arc::clone(&self.memory), start: self.start + start, length }
    }

    /// Shortens the window to its first `length` bytes, if it is longer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Returns the start of the window in its memory, in bytes.
    pub fn window_start(&self) -> usize {
        self.start
    }

    /// Returns the bytes of memory that this handle keeps alive.
    pub fn memory_length(&self) -> usize {
        self.memory.pages.len() * PAGE
    }

    /// Moves the window to `length` bytes from byte `start` of the memory on, wherever it was before. So a handle can be lent out
    /// for a part of its memory, and be restored.
    ///
    /// # Panics
    /// If the window does not lie within the memory.
    pub fn move_window(&mut self, start: usize, length: usize) {
        assert!(start + length <= self.memory.pages.len() * PAGE, "a window lies within its memory");
        (self.start, self.length) = (start, length);
    }

    /// Returns whether every byte is zero.
    pub fn is_zero(&self) -> bool {
        is_zero(self.as_slice())
    }

    /// Returns the address of the first byte, for the kernel.
    pub fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr()
    }

    /// Returns whether the window starts at a multiple of `alignment` bytes in memory (a power of two).
    pub fn is_aligned_to(&self, alignment: usize) -> bool {
        self.start & (alignment.min(PAGE) - 1) == 0
    }

    /// Returns the index under which the engine that owns `pool` registered this memory. `None` for memory of another pool, whose
    /// index is meaningless in this engine's ring.
    pub(crate) fn registration_in(&self, pool: &BufferPool) -> Option<u16> {
        let owner = self.memory.pool.as_ref()?;
        if Arc::ptr_eq(owner, &pool.free) { self.memory.registration } else { None }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.length)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.put(std::mem::take(&mut self.pages), self.registration);
        }
    }
}

/// Returns whether every byte of `bytes` is zero, sixteen at a time.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = bytemuck::pod_align_to::<u8, u128>(bytes);
    head.iter().chain(tail).all(|byte| *byte == 0)
        && words.chunks(16).all(|chunk| chunk.iter().fold(0, |all, word| all | word) == 0)
}

/// Hands out buffers and takes their memory back. A clone is another handle to the same pool. A buffer holds whatever its
/// last user left there.
#[derive(Clone, Default)]
pub struct BufferPool {
    free: Arc<FreeLists>,
}

#[derive(Default)]
struct FreeLists {
    by_order: Mutex<[FreeList; POOLED_PAGES_MAX.ilog2() as usize + 1]>,
}

#[derive(Default)]
struct FreeList {
    /// Registered memory: handed out first, and kept while the pool lives.
    registered: Vec<(Vec<Page>, u16)>,
    plain: Vec<Vec<Page>>,
}

impl BufferPool {
    /// Makes a pool without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a pool of one buffer for each of `lengths`. `register` gets the address and length of each, and returns whether it
    /// registered them in this order, from index 0 on. If not, the pool starts empty.
    pub(crate) fn with_registered(
        lengths: &[usize],
        register: impl FnOnce(&[(*mut u8, usize)]) -> bool,
    ) -> Self {
        let mut blocks: Vec<Vec<Page>> =
            lengths.iter().map(|length| bytemuck::zeroed_vec(pages_of(*length))).collect();
        let addresses: Vec<_> =
            blocks.iter_mut().map(|pages| (pages.as_mut_ptr().cast(), pages.len() * PAGE)).collect();
        let pool = Self::new();
        if register(&addresses) {
            let mut lists = pool.free.lock();
            for (pages, index) in blocks.into_iter().zip(0..) {
                lists[order_of(pages.len())].registered.push((pages, index));
            }
        }
        pool
    }

    /// Hands out a buffer of `length` bytes with arbitrary content.
    pub fn take(&self, length: usize) -> Buffer {
        let page_count = pages_of(length);
        if page_count > POOLED_PAGES_MAX {
            return Buffer::zeroed(length);
        }
        let (pages, registration) = self.free.take(page_count);
        let memory = Memory { pages, pool: Some(Arc::clone(&self.free)), registration };
        Buffer { memory: Arc::new(memory), start: 0, length }
    }
}

impl FreeLists {
    fn lock(&self) -> MutexGuard<'_, [FreeList; POOLED_PAGES_MAX.ilog2() as usize + 1]> {
        self.by_order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, page_count: usize) -> (Vec<Page>, Option<u16>) {
        let mut lists = self.lock();
        let list = &mut lists[order_of(page_count)];
        if let Some((pages, index)) = list.registered.pop() {
            return (pages, Some(index));
        }
        let pages = list.plain.pop();
        drop(lists);
        (pages.unwrap_or_else(|| bytemuck::zeroed_vec(page_count)), None)
    }

    fn put(&self, pages: Vec<Page>, registration: Option<u16>) {
        let kept_max = POOLED_BUFFERS_MAX.min(POOLED_PAGES_TOTAL_MAX / pages.len());
        let mut lists = self.lock();
        let list = &mut lists[order_of(pages.len())];
        match registration {
            Some(index) => list.registered.push((pages, index)),
            None if list.plain.len() < kept_max => list.plain.push(pages),
            None => {}
        }
    }
}

fn pages_of(length: usize) -> usize {
    length.div_ceil(PAGE).next_power_of_two()
}

fn order_of(page_count: usize) -> usize {
    page_count.ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_buffer_is_not_written_under_its_other_handles() {
        let mut first = Buffer::copy_of(b"before");
        let second = first.clone();
        assert!(first.as_mut_slice().is_none());
        first.fill_from(b"after!");
        assert_eq!((first.as_slice(), second.as_slice()), (&b"after!"[..], &b"before"[..]));
    }

    #[test]
    fn memory_goes_back_to_its_pool_with_the_last_handle_only() {
        let pool = BufferPool::new();
        let buffer = pool.take(5000);
        let (address, part) = (buffer.as_ptr(), buffer.slice(4096, 100));
        drop(buffer);
        assert_ne!(pool.take(5000).as_ptr(), address, "a slice still holds the memory");
        drop(part);
        let reused: Vec<_> = (0..2).map(|_| pool.take(5000)).collect();
        assert!(reused.iter().any(|buffer| buffer.as_ptr() == address));
    }

    #[test]
    fn a_registration_is_known_to_its_own_pool_only() {
        let pool = BufferPool::with_registered(&[4096, 8192], |addresses| {
            assert_eq!(addresses.iter().map(|(_, length)| *length).collect::<Vec<_>>(), [4096, 8192]);
            true
        });
        let (small, large, third) = (pool.take(1), pool.take(8192), pool.take(4096));
        assert_eq!(small.registration_in(&pool), Some(0));
        assert_eq!(large.slice(4096, 10).registration_in(&pool), Some(1));
        assert_eq!(third.registration_in(&pool), None);
        assert_eq!(small.registration_in(&BufferPool::new()), None);
        drop((small, third));
        assert_eq!(pool.take(4096).registration_in(&pool), Some(0), "registered memory is preferred");
    }

    #[test]
    fn a_pool_without_registration_starts_empty_and_works() {
        let pool = BufferPool::with_registered(&[4096], |_| false);
        assert_eq!(pool.take(4096).registration_in(&pool), None);
    }

    #[test]
    fn zeroes_are_told_from_a_single_other_byte_at_any_place() {
        for length in [0, 1, 15, 16, 17, 4096, 4099] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes));
            for index in (0..length).step_by(7).chain(length.checked_sub(1)) {
                bytes[index] = 1;
                assert!(!is_zero(&bytes), "byte {index} of {length}");
                bytes[index] = 0;
            }
        }
    }
}
