//! The program inside the demo's VM: it writes and checks its disk all the time. On request it also checks memory, uses a TPM,
//! and answers a client outside.
//!
//! ```text
//!   fill ─► workers: each owns every n-th block, writes, reads, compares, flushes
//!           memory:  pages are compared and rewritten
//!           TPM:     a register is extended, a counter counts
//!           server:  requests are counted
//!             └─► ten times a second a line on the console; `verify` ends them
//!   verify ─► memory and the whole disk are read and compared, the disk hashed over block numbers and versions
//! ```
//!
//! The guest image contains it as a static program. It therefore uses only the standard library, and the lab's two files about
//! the content of blocks. `testbed::vm` reads its lines on the console.
//!
//! Usage: `guest_disk_check DEVICE[:DEVICE…] BLOCK_BYTES WORKERS FILL_BYTES SEED [MEMORY_BYTES [PORT [SWEPT_BYTES [PAUSE_US]]]]`.
//! Several devices are one striped disk. 0 switches a part off; with 0 workers the VM only reports its ticks.

#[path = "guest_disk_check/memory.rs"]
mod memory;
#[path = "../workload/pattern.rs"]
#[expect(dead_code, unreachable_pub, reason = "shared with the library, which uses the rest")]
mod pattern;
#[path = "../workload/random.rs"]
#[expect(unreachable_pub, reason = "shared with the library")]
mod random;
#[path = "guest_disk_check/server.rs"]
mod server;
#[path = "guest_disk_check/tally.rs"]
mod tally;
#[path = "guest_disk_check/tpm.rs"]
mod tpm;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::{Duration, Instant};

use memory::{Memory, Sweep};
use pattern::{Expected, Stamp, digest_block};
use random::Random;
use tally::Tally;
use tpm::Tpm;

const SWEEP_BYTES: usize = 1 << 20;
/// The workers flush once in this many requests.
const REQUESTS_PER_FLUSH: u64 = 2000;
const READS_PERCENT: u64 = 70;
/// The alignment in memory that direct I/O needs, on every disk.
const MEMORY_ALIGNMENT: usize = 4096;

fn main() {
    match Arguments::parse().and_then(|arguments| run(&arguments)) {
        Ok(()) => {}
        Err(error) => say(&format!("failed {error}")),
    }
}

struct Arguments {
    device: String,
    block_bytes: usize,
    workers: u64,
    fill_bytes: u64,
    seed: u64,
    memory_bytes: u64,
    /// Port of the web server; 0: none.
    port: u16,
    /// Bytes of the VM's memory that are written as fast as possible.
    swept_bytes: u64,
    pause: Duration,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let [device, block_bytes, workers, fill_bytes, seed, more @ ..] = words.as_slice() else {
            let usage = "guest_disk_check DEVICE BLOCK_BYTES WORKERS FILL_BYTES SEED [MEMORY_BYTES [PORT \
                         [SWEPT_BYTES [PAUSE_US]]]]";
            return Err(format!("usage: {usage}"));
        };
        let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
        let block_bytes = number(block_bytes)? as usize;
        if block_bytes == 0 || !SWEEP_BYTES.is_multiple_of(block_bytes) {
            return Err(format!("{block_bytes} is no part of {SWEEP_BYTES}"));
        }
        Ok(Self {
            device: device.clone(),
            block_bytes,
            workers: number(workers)?,
            fill_bytes: number(fill_bytes)?,
            seed: number(seed)?,
            memory_bytes: more.first().map_or(Ok(0), |word| number(word))?,
            port: u16::try_from(more.get(1).map_or(Ok(0), |word| number(word))?)
                .map_err(|error| format!("the port: {error}"))?,
            swept_bytes: more.get(2).map_or(Ok(0), |word| number(word))?,
            pause: Duration::from_micros(more.get(3).map_or(Ok(0), |word| number(word))?),
        })
    }
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let disk = Disk::open(arguments)?;
    let bytes = disk.blocks * arguments.block_bytes as u64;
    let Disk { blocks, sector_bytes, .. } = &disk;
    let device = &arguments.device;
    say(&format!("disk device={device} sector_bytes={sector_bytes} blocks={blocks} bytes={bytes}"));
    let filled = disk.fill(arguments.fill_bytes)?;
    say(&format!("filled bytes={}", filled * arguments.block_bytes as u64));
    let mut memory = Memory::fill(arguments.memory_bytes, arguments.seed);
    let mut sweep = Sweep::new(arguments.swept_bytes);
    let mut tpm = Tpm::find()?;
    if arguments.port != 0 {
        server::start(arguments.port).map_err(|error| format!("port {}: {error}", arguments.port))?;
    }

    let tally = Tally::default();
    let versions = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.workers)
            .map(|worker| {
                let (disk, tally) = (&disk, &tally);
                scope.spawn(move || disk.work(worker, arguments.workers, filled, tally))
            })
            .collect();
        scope.spawn(|| tally.tick());
        scope.spawn(|| memory.work(&tally));
        scope.spawn(|| sweep.work(&tally));
        scope.spawn(|| tpm.as_mut().map(|tpm| tpm.work(&tally)));
        wait_for_command("verify");
        tally.stop();
        workers.into_iter().map(|worker| worker.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    disk.flush()?;
    memory.verify(&tally);
    disk.verify(filled, &versions, &memory, &tally)?;
    wait_for_command("end");
    Ok(())
}

struct Disk {
    files: Vec<File>,
    /// Bytes of a logical sector, as the system reports them; 0 for a file.
    sector_bytes: u64,
    blocks: u64,
    block_bytes: usize,
    seed: u64,
    pause: Duration,
}

impl Disk {
    fn open(arguments: &Arguments) -> Result<Self, String> {
        // O_DIRECT of this architecture: otherwise the page cache would answer for the disk.
        const O_DIRECT: i32 =
            if cfg!(any(target_arch = "aarch64", target_arch = "arm")) { 0x10000 } else { 0x4000 };
        let Arguments { block_bytes, seed, pause, .. } = *arguments;
        let (mut files, mut smallest, mut sector) = (Vec::new(), u64::MAX, 0);
        for device in arguments.device.split(':') {
            let context = |error: io::Error| format!("{device}: {error}");
            let mut options = OpenOptions::new();
            let opened = options.read(true).write(true).custom_flags(O_DIRECT).open(device);
            let mut file = opened.map_err(context)?;
            smallest = smallest.min(io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(context)?);
            sector = sector.max(sector_bytes(device));
            files.push(file);
        }
        let bytes = match files.len() as u64 {
            1 => smallest,
            devices => devices * (smallest / SWEEP_BYTES as u64) * SWEEP_BYTES as u64,
        };
        let blocks = bytes / block_bytes as u64;
        Ok(Self { files, sector_bytes: sector, blocks, block_bytes, seed, pause })
    }

    /// Returns the device that holds a byte of the disk, and the offset there.
    fn place(&self, offset: u64) -> (&File, u64) {
        let (devices, sweep) = (self.files.len() as u64, SWEEP_BYTES as u64);
        let stripe = offset / sweep;
        (&self.files[(stripe % devices) as usize], stripe / devices * sweep + offset % sweep)
    }

    fn flush(&self) -> Result<(), String> {
        self.files.iter().try_for_each(File::sync_data).map_err(|error| format!("flush: {error}"))
    }

    /// Writes the first blocks with their first version; returns their number.
    fn fill(&self, bytes: u64) -> Result<u64, String> {
        let end = (bytes / self.block_bytes as u64).min(self.blocks);
        let mut memory = Aligned::new(SWEEP_BYTES);
        let per_request = (SWEEP_BYTES / self.block_bytes) as u64;
        for first in (0..end).step_by(per_request as usize) {
            let count = per_request.min(end - first);
            let part = &mut memory.bytes()[..count as usize * self.block_bytes];
            for (bytes, block) in part.chunks_exact_mut(self.block_bytes).zip(first..) {
                Stamp { seed: self.seed, block, version: 1 }.fill(bytes);
            }
            self.write(first, part)?;
        }
        Ok(end)
    }

    /// Works on every `workers`th block, from the `worker`th on, until stopped; returns their versions.
    fn work(&self, worker: u64, workers: u64, filled: u64, tally: &Tally) -> Vec<u32> {
        let own = (self.blocks + workers - 1 - worker) / workers;
        let mut versions: Vec<u32> =
            (0..own).map(|index| u32::from(index * workers + worker < filled)).collect();
        let mut random = Random::new(self.seed ^ (worker << 32) ^ 0x1a7e);
        let mut memory = Aligned::new(self.block_bytes);
        while own > 0 && !tally.is_stopped() {
            let index = random.below(own);
            let block = index * workers + worker;
            let version = &mut versions[index as usize];
            let bytes = memory.bytes();
            let dice = random.below(REQUESTS_PER_FLUSH);
            let began = Instant::now();
            let result = if dice == 0 {
                self.flush()
            } else if dice % 100 < READS_PERCENT {
                self.read(block, bytes).and_then(|()| self.compare(block, *version, bytes))
            } else {
                Stamp { seed: self.seed, block, version: *version + 1 }.fill(bytes);
                self.write(block, bytes).map(|()| *version += 1)
            };
            if let Err(error) = result {
                tally.wrong(&error);
            }
            tally.complete(began);
            std::thread::sleep(self.pause);
        }
        versions
    }

    /// Reads and compares everything, and prints the result with a digest of every block's version.
    fn verify(
        &self,
        filled: u64,
        versions: &[Vec<u32>],
        checked: &Memory,
        tally: &Tally,
    ) -> Result<(), String> {
        let mut memory = Aligned::new(SWEEP_BYTES);
        let per_request = (SWEEP_BYTES / self.block_bytes) as u64;
        let mut digest = 0;
        for first in (0..self.blocks).step_by(per_request as usize) {
            let count = per_request.min(self.blocks - first);
            let part = &mut memory.bytes()[..count as usize * self.block_bytes];
            self.read(first, part)?;
            for (bytes, block) in part.chunks_exact(self.block_bytes).zip(first..) {
                let version = match versions.len() as u64 {
                    // No worker has changed the filled blocks.
                    0 => u32::from(block < filled),
                    workers => {
                        let own = &versions[(block % workers) as usize];
                        own.get((block / workers) as usize).copied().unwrap_or(0)
                    }
                };
                if let Err(error) = self.compare(block, version, bytes) {
                    tally.wrong(&error);
                }
                digest = digest_block(digest, block, version);
            }
        }
        let (blocks, seed, pages, errors) = (self.blocks, self.seed, checked.pages(), tally.errors());
        say(&format!(
            "verified blocks={blocks} seed={seed} digest={digest:016x} memory_pages={pages} errors={errors}"
        ));
        Ok(())
    }

    fn compare(&self, block: u64, version: u32, bytes: &[u8]) -> Result<(), String> {
        let expected = match version {
            0 => Expected::Zeroes,
            version => Expected::Stamp(Stamp { seed: self.seed, block, version }),
        };
        expected.check(bytes).map_err(|mismatch| format!("block {block}: {mismatch}"))
    }

    fn read(&self, block: u64, bytes: &mut [u8]) -> Result<(), String> {
        let offset = block * self.block_bytes as u64;
        let (file, at) = self.place(offset);
        file.read_exact_at(bytes, at).map_err(|error| format!("read at byte {offset}: {error}"))
    }

    fn write(&self, block: u64, bytes: &[u8]) -> Result<(), String> {
        let offset = block * self.block_bytes as u64;
        let (file, at) = self.place(offset);
        file.write_all_at(bytes, at).map_err(|error| format!("write at byte {offset}: {error}"))
    }
}

/// Returns the bytes of a device's logical sector; 0 if unknown.
fn sector_bytes(device: &str) -> u64 {
    let name = device.rsplit('/').next().unwrap_or_default();
    let told = std::fs::read_to_string(format!("/sys/block/{name}/queue/logical_block_size"));
    told.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Waits until the console says `command`, or is closed.
fn wait_for_command(command: &str) {
    for line in io::stdin().lock().lines() {
        match line {
            Ok(line) if line.trim() == command => return,
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// Writes one line to the console at once: other threads and the kernel write there too.
fn say(words: &str) {
    let line = format!("sterna: {words}\n");
    // Nothing reads the lines if there is no console.
    let _ = io::stdout().lock().write_all(line.as_bytes());
}

struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let memory = vec![0; length + MEMORY_ALIGNMENT];
        let start = memory.as_ptr().align_offset(MEMORY_ALIGNMENT);
        Self { memory, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}
