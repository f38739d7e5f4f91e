//! Kills a process that writes an image at any moment: the image stays valid, and all acknowledged data is there, flushed or not.
//!
//! The child makes the same requests at every run of a seed, so the parent knows them. It reports acknowledgements.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;

use block::engine::EngineChoice;
use block::store::qcow2::{Qcow2Image, Qcow2Store};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability};
use futures_util::future::join_all;

use crate::tools::{
    Lane, Random, alone, check_clean, check_whole, folder, on_engine, path_in, read, run, text,
};

pub(crate) const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
pub(crate) const FLUSH_EVERY: u64 = 3;
/// How many batches the child may be ahead of its last reported flush.
const AHEAD_MAX: u64 = 4 * FLUSH_EVERY;

const IMAGE_VARIABLE: &str = "STERNA_TEST_QCOW2";
const SEED_VARIABLE: &str = "STERNA_TEST_SEED";

/// A request of the child: blocks, and the value of all their bytes afterwards; 0 stands for a discard.
struct Step {
    first: u64,
    count: u64,
    fill: u8,
}

impl Step {
    fn range(&self) -> ByteRange {
        ByteRange::new(self.first * BLOCK, self.count * BLOCK)
    }
}

fn batch(seed: u64, number: u64) -> Vec<Step> {
    let mut random = Random::new(seed * 1_000_003 + number);
    let mut steps: Vec<Step> = Vec::new();
    for _ in 0..12 {
        let longest = if random.below(6) == 0 { 40 } else { 4 };
        let step = Step {
            first: random.below(SIZE / BLOCK - 40),
            count: 1 + random.below(longest),
            fill: if random.below(4) == 0 { 0 } else { (number % 250) as u8 + 1 },
        };
        let is_apart =
            |other: &Step| other.first + other.count <= step.first || step.first + step.count <= other.first;
        if steps.iter().all(is_apart) {
            steps.push(step);
        }
    }
    steps
}

/// In the child: writes until it is killed. In the suite, without an image, it does nothing.
#[test]
fn writes_until_it_is_killed() {
    let (Ok(path), Ok(seed)) = (std::env::var(IMAGE_VARIABLE), std::env::var(SEED_VARIABLE)) else { return };
    let seed = seed.parse().unwrap();
    let work = move |lane: Lane| {
        let path = path.clone();
        async move {
            let device = Rc::new(lane.open(Path::new(&path), Access::ReadWrite).await);
            for number in 1.. {
                run_batch(&device, seed, number).await;
                println!("\nacknowledged {number}");
                if number % FLUSH_EVERY == 0 {
                    flush_beside(&lane, &device, number);
                }
            }
        }
    };
    if !on_engine(EngineChoice::Ring, &work) {
        on_engine(EngineChoice::Threads, &work);
    }
}

pub(crate) async fn run_batch(device: &Rc<Qcow2Store>, seed: u64, number: u64) {
    let requests = batch(seed, number).into_iter().map(|step| {
        let range = step.range();
        match step.fill {
            0 => device.discard(range),
            fill => {
                let data = Buffer::copy_of(&vec![fill; range.length as usize]);
                device.write(range.offset, data, Durability::Volatile)
            }
        }
    });
    assert!(join_all(requests.collect::<Vec<_>>()).await.iter().all(Result::is_ok));
}

fn flush_beside(lane: &Lane, device: &Rc<Qcow2Store>, number: u64) {
    let device = Rc::clone(device);
    lane.handle.spawn(async move {
        device.flush().await.unwrap();
        println!("\nflushed {number}");
    });
}

fn spawn_writer(path: &Path, seed: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "crash::writes_until_it_is_killed", "--nocapture"]);
    command.env(IMAGE_VARIABLE, path).env(SEED_VARIABLE, seed.to_string());
    command.stdout(Stdio::piped()).spawn().unwrap()
}

fn kill_after(mut writer: Child, flushes: u64) -> u64 {
    let mut last = 0;
    let mut told = 0;
    for line in BufReader::new(writer.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(number) = line.strip_prefix("acknowledged ") {
            last = number.parse().unwrap();
        }
        if !line.starts_with("flushed ") {
            continue;
        }
        told += 1;
        if told == flushes {
            writer.kill().unwrap();
        }
    }
    writer.wait().unwrap();
    last
}

#[derive(Clone, Debug)]
struct Allowed {
    old: bool,
    /// Bytes that requests of the writer fill it with.
    fills: BTreeSet<u8>,
}

/// Checks that each sector is as the last acknowledged batch left it, or as a later one did.
pub(crate) fn check_content(before: &[u8], found: &[u8], seed: u64, sure: u64) {
    const SECTOR: usize = 512;
    let untouched = Allowed { old: true, fills: BTreeSet::new() };
    let mut allowed = vec![untouched; (SIZE / BLOCK) as usize];
    for number in 1..=sure + AHEAD_MAX {
        for step in batch(seed, number) {
            for block in step.first..step.first + step.count {
                let allowed = &mut allowed[block as usize];
                if number <= sure {
                    *allowed = Allowed { old: false, fills: BTreeSet::new() };
                }
                allowed.fills.insert(step.fill);
            }
        }
    }
    // Later batches may be there in part, by sectors.
    for (index, (sector, old)) in found.chunks(SECTOR).zip(before.chunks(SECTOR)).enumerate() {
        let allowed = &allowed[index * SECTOR / BLOCK as usize];
        let is_filled = sector.iter().all(|byte| *byte == sector[0]) && allowed.fills.contains(&sector[0]);
        let is_one = is_filled || allowed.old && sector == old;
        assert!(is_one, "seed {seed}, sure {sure}, sector {index}: {} of {allowed:?}", sector[0]);
    }
}

async fn content(lane: &Lane, path: &Path) -> Vec<u8> {
    let device = lane.open(path, Access::ReadOnly).await;
    let mut bytes = Vec::new();
    for offset in (0..SIZE).step_by(1 << 20) {
        bytes.extend(read(&device, offset, 1 << 20).await);
    }
    bytes
}

fn check_kills(cluster_size: u64, rounds: u64) {
    let folder = folder();
    let path = path_in(&folder, "disk.qcow2");
    drop(Qcow2Image::create(&path, SIZE, &alone(cluster_size)).unwrap());
    let mut lost = 0;
    let mut before = vec![0; SIZE as usize];
    for seed in 1..=rounds {
        let acknowledged = kill_after(spawn_writer(&path, seed), 1 + seed * 7 % 11);
        assert!(acknowledged > 0, "the writer has not worked");
        // Its last writes may still be in flight; the lock tells.
        let waiting =
            Qcow2Image::open_waiting(&path, Access::ReadWrite, |_| block::store::image::Patience::Wait);
        drop(waiting.unwrap());
        lost = check_whole(&path);
        let (path, expected) = (path.clone(), Rc::new(before.clone()));
        let (sender, receiver) = std::sync::mpsc::channel();
        on_engine(EngineChoice::Threads, move |lane| {
            let (path, expected, sender) = (path.clone(), Rc::clone(&expected), sender.clone());
            async move {
                let found = content(&lane, &path).await;
                check_content(&expected, &found, seed, acknowledged);
                sender.send(found).unwrap();
            }
        });
        before = receiver.recv().unwrap();
    }
    eprintln!("clusters of {cluster_size}: {lost} are lost after {rounds} kills, and found again");
    if lost > 0 {
        run("qemu-img", &["check", "-q", "-f", "qcow2", "-r", "leaks", text(&path)]);
    }
    check_clean(&path);
}

#[test]
fn a_killed_writer_leaves_the_usual_clusters_whole() {
    check_kills(64 << 10, 6);
}

#[test]
fn a_killed_writer_leaves_small_clusters_whole() {
    check_kills(4096, 6);
}

#[test]
fn a_killed_writer_leaves_the_smallest_clusters_whole() {
    check_kills(512, 3);
}
