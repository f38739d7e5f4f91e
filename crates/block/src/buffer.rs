//! The memory of a request, behind one type.
//!
//! A [`Buffer`] is a window into page-aligned memory that several handles may share: a mirrored write goes to two
//! stores from one buffer. The memory lives until the last handle is gone, so a kernel that still works on a request
//! whose future was dropped never sees it freed. It goes back to its [`BufferPool`] then.

use std::sync::{Arc, Mutex, PoisonError};

/// Page size of the memory behind buffers, in bytes: the strictest alignment of direct I/O.
pub const PAGE: usize = 4096;

/// Pages of one buffer that a pool keeps for reuse: 256 KiB, the largest chunk that the mover asks for at a time
/// with many in flight. Larger ones are freed at once.
const POOLED_PAGES_MAX: usize = 256;
/// Free buffers that a pool keeps for each size.
const POOLED_BUFFERS_MAX: usize = 128;

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
    /// Where the pages go when the last handle is gone; `None`: they are freed.
    pool: Option<Arc<FreeLists>>,
}

impl Buffer {
    /// Makes a buffer of `length` zero bytes outside any pool.
    pub fn zeroed(length: usize) -> Self {
        let pages = bytemuck::zeroed_vec(length.div_ceil(PAGE));
        Self { memory: Arc::new(Memory { pages, pool: None }), start: 0, length }
    }

    /// Makes a buffer that holds a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.fill_from(bytes);
        buffer
    }

    /// Number of bytes in the window.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Tells whether the window is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes of the window.
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.memory.pages)[self.start..self.start + self.length]
    }

    /// The bytes of the window for writing, or `None` while another handle shares the memory.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let (start, end) = (self.start, self.start + self.length);
        let memory = Arc::get_mut(&mut self.memory)?;
        Some(&mut bytemuck::cast_slice_mut(&mut memory.pages)[start..end])
    }

    /// Tells whether this is the only handle to its memory: only then can it be read into.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }

    /// Copies `bytes` to the start of the window.
    ///
    /// A shared buffer is replaced by a private one first, so other handles keep what they see.
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

    /// Another handle to `length` bytes of this window, from `start` on.
    ///
    /// # Panics
    /// If the part does not lie within the window.
    pub fn slice(&self, start: usize, length: usize) -> Self {
        assert!(start + length <= self.length, "a slice lies within its buffer");
        Self { memory: Arc::clone(&self.memory), start: self.start + start, length }
    }

    /// Shortens the window to its first `length` bytes; longer than it is changes nothing.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Moves the window to `length` bytes from byte `start` of the memory on, wherever it was before.
    ///
    /// So one handle can be lent out for a part of its memory, and be made whole again.
    ///
    /// # Panics
    /// If the window does not lie within the memory.
    pub fn move_window(&mut self, start: usize, length: usize) {
        assert!(start + length <= self.memory.pages.len() * PAGE, "a window lies within its memory");
        (self.start, self.length) = (start, length);
    }

    /// Tells whether every byte is zero.
    pub fn is_zero(&self) -> bool {
        is_zero(self.as_slice())
    }

    /// Address of the first byte, for handing to the kernel.
    pub fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr()
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
            pool.put(std::mem::take(&mut self.pages));
        }
    }
}

/// Tells whether every byte of `bytes` is zero, sixteen at a time.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = bytemuck::pod_align_to::<u8, u128>(bytes);
    head.iter().chain(tail).all(|byte| *byte == 0)
        && words.chunks(16).all(|chunk| chunk.iter().fold(0, |all, word| all | word) == 0)
}

/// Hands out buffers and takes their memory back.
///
/// A clone is another handle to the same pool. A buffer from a pool holds whatever its last user left there.
#[derive(Clone, Default)]
pub struct BufferPool {
    free: Arc<FreeLists>,
}

/// Free memory by its power-of-two number of pages. Locked only for a push or a pop; a buffer may be dropped on a
/// helper thread.
#[derive(Default)]
struct FreeLists {
    by_order: Mutex<[Vec<Vec<Page>>; POOLED_PAGES_MAX.ilog2() as usize + 1]>,
}

impl BufferPool {
    /// Makes an empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Hands out a buffer of `length` bytes with arbitrary content.
    pub fn take(&self, length: usize) -> Buffer {
        let pages = length.div_ceil(PAGE).next_power_of_two();
        if pages > POOLED_PAGES_MAX {
            return Buffer::zeroed(length);
        }
        let order = pages.ilog2() as usize;
        let free = self.free.by_order.lock().unwrap_or_else(PoisonError::into_inner)[order].pop();
        let pages = free.unwrap_or_else(|| bytemuck::zeroed_vec(pages));
        Buffer { memory: Arc::new(Memory { pages, pool: Some(Arc::clone(&self.free)) }), start: 0, length }
    }
}

impl FreeLists {
    fn put(&self, pages: Vec<Page>) {
        let order = pages.len().ilog2() as usize;
        let list = &mut self.by_order.lock().unwrap_or_else(PoisonError::into_inner)[order];
        if list.len() < POOLED_BUFFERS_MAX {
            list.push(pages);
        }
    }
}
