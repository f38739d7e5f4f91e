//! Submission entries, for files by descriptor and for registered files alike.

use io_uring::{opcode, squeue, types};

use crate::device::ByteRange;
use crate::engine::AllocateMode;

pub(super) trait FileArgument {
    fn poll(self, events: u32) -> squeue::Entry;
    fn read(self, to: *mut u8, length: u32, offset: u64, registration: Option<u16>) -> squeue::Entry;
    fn write(
        self,
        from: *const u8,
        length: u32,
        offset: u64,
        index: Option<u16>,
        flags: i32,
    ) -> squeue::Entry;
    fn sync(self) -> squeue::Entry;
    fn allocate(self, mode: AllocateMode, range: ByteRange) -> squeue::Entry;
    fn accept(self) -> squeue::Entry;
    fn receive(self, to: *mut u8, length: u32) -> squeue::Entry;
    fn send(self, from: *const u8, length: u32) -> squeue::Entry;
    fn send_message(self, header: *const libc::msghdr) -> squeue::Entry;
}

macro_rules! file_argument {
    ($type:ty) => {
        impl FileArgument for $type {
            fn poll(self, events: u32) -> squeue::Entry {
                opcode::PollAdd::new(self, events).build()
            }

            fn read(self, to: *mut u8, length: u32, offset: u64, index: Option<u16>) -> squeue::Entry {
                match index {
                    Some(index) => opcode::ReadFixed::new(self, to, length, index).offset(offset).build(),
                    None => opcode::Read::new(self, to, length).offset(offset).build(),
                }
            }

            fn write(
                self,
                from: *const u8,
                length: u32,
                offset: u64,
                index: Option<u16>,
                flags: i32,
            ) -> squeue::Entry {
                match index {
                    Some(index) => opcode::WriteFixed::new(self, from, length, index)
                        .offset(offset)
                        .rw_flags(flags)
                        .build(),
                    None => opcode::Write::new(self, from, length).offset(offset).rw_flags(flags).build(),
                }
            }

            fn sync(self) -> squeue::Entry {
                opcode::Fsync::new(self).flags(types::FsyncFlags::DATASYNC).build()
            }

            fn allocate(self, mode: AllocateMode, range: ByteRange) -> squeue::Entry {
                let mode = match mode {
                    AllocateMode::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    AllocateMode::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                };
                opcode::Fallocate::new(self, range.length).offset(range.offset).mode(mode).build()
            }

            fn accept(self) -> squeue::Entry {
                opcode::Accept::new(self, std::ptr::null_mut(), std::ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }

            fn receive(self, to: *mut u8, length: u32) -> squeue::Entry {
                opcode::Recv::new(self, to, length).build()
            }

            fn send(self, from: *const u8, length: u32) -> squeue::Entry {
                opcode::Send::new(self, from, length).flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL).build()
            }

            fn send_message(self, header: *const libc::msghdr) -> squeue::Entry {
                let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
                opcode::SendMsg::new(self, header).flags(flags.cast_unsigned()).build()
            }
        }
    };
}

file_argument!(types::Fd);
file_argument!(types::Fixed);
