//! One volume that grows on its tour over three hosts, at its owner, at hosts that forward clients, and in kept images. Uses the
//! product's [`Stay`] and journal; the daemon is killed between any two steps.
//!
//! ```text
//!   write │ grow │ killed ──► moves on, with or without its image left behind ──► returns incrementally
//!           └──► reported to the hosts that forward clients, sooner or later
//! ```
//! It has no disks and takes no part in the seed's migrations: a separate simulation.

use std::collections::BTreeMap;
use std::time::Duration;

use chronicle::{
    BlockRange, BlockSize, ByteRange, Epoch, Generation, Kept, LayeredBitmap, MarkPolicy, Recorded,
    ReplicaOf, StayId,
};
use migration::journal::{
    Entry, ExportSettings, Forwarding, ImageLocation, Moved, Record, State, VolumeRecord, VolumeState,
};
use migration::stay::{self, Beginning, Stay};
use migration::{HostId, MigrationId, VolumeId};

use crate::random::Random;
use crate::world::Violation;

const HOSTS: usize = 3;
const TURNS: u64 = 60;
const VOLUME: VolumeId = VolumeId([9; 16]);
const BLOCK: u64 = BlockSize::DEFAULT.bytes();
const REGIONS: MarkPolicy = MarkPolicy::Regions { blocks_per_region: 4 };
/// Blocks at first, the largest growth, and the limit.
const BLOCKS: u64 = 6;
const GROWTH_MAX: u64 = 8;
const BLOCKS_MAX: u64 = 64;

pub(crate) fn play(seed: u64) -> Option<Violation> {
    let mut random = Random::new(seed ^ 0x6772_6f77).fork();
    let mut tour = Tour::new();
    (0..TURNS).find_map(|turn| {
        let detail = tour.turn(&mut random)?;
        Some(Violation { checker: "growth", at: Duration::from_millis(turn), detail })
    })
}

#[derive(Default)]
struct Host {
    /// Its journal: where the volume has gone.
    state: State,
    kept: Option<(u64, Generation, Vec<u64>)>,
    numbers: u64,
    /// The size at its owner that it has not learned of yet.
    untold: Option<u64>,
}

struct Tour {
    hosts: [Host; HOSTS],
    owner: usize,
    generation: Generation,
    /// The owner's image: numbers of writes, by block.
    content: Vec<u64>,
    stay: Stay,
    kept: Option<Kept>,
    marks: Vec<(Epoch, Vec<BlockRange>)>,
    writes: u64,
}

fn beginning(id: StayId, size_bytes: u64) -> Beginning {
    Beginning { id, block_size: BlockSize::DEFAULT, size_bytes, regions: REGIONS }
}

impl Tour {
    fn new() -> Self {
        Self {
            hosts: Default::default(),
            owner: 0,
            generation: Generation(1),
            content: vec![0; BLOCKS as usize],
            stay: Stay::begin(beginning(StayId::Made, BLOCKS * BLOCK)),
            kept: None,
            marks: Vec::new(),
            writes: 0,
        }
    }

    fn size(&self) -> u64 {
        self.content.len() as u64 * BLOCK
    }

    fn turn(&mut self, random: &mut Random) -> Option<String> {
        match random.below(10) {
            0 => {
                let to = (self.owner + 1 + random.index(HOSTS - 1)) % HOSTS;
                self.go_to(to, random)
            }
            1 => {
                self.grow(random);
                None
            }
            2 => {
                self.restart();
                None
            }
            3 => {
                let host = random.index(HOSTS);
                self.tell(host)
            }
            _ => self.write(random),
        }
    }

    fn write(&mut self, random: &mut Random) -> Option<String> {
        let host = random.index(HOSTS);
        let offered = if host == self.owner { self.size() } else { self.offered(host)? };
        let start = random.below(offered / BLOCK);
        let length = 1 + random.below(2).min(offered / BLOCK - start - 1);
        let range = ByteRange::new(start * BLOCK, length * BLOCK);
        loop {
            match self.stay.record(range) {
                Ok(Recorded::Marked(_)) => break,
                Ok(Recorded::WaitForMark(epoch)) => {
                    let regions = self.stay.regions_to_mark(range);
                    self.marks.push((epoch, vec![regions]));
                    self.stay.marked(self.stay.id(), epoch, regions);
                }
                Err(error) => return Some(format!("host {}: a write fails: {error}", self.owner)),
            }
        }
        self.writes += 1;
        for block in start..start + length {
            self.content[block as usize] = self.writes;
        }
        None
    }

    /// Returns the size that a former host offers; `None` if it does not forward clients.
    fn offered(&self, host: usize) -> Option<u64> {
        self.hosts[host].state.moved.get(&VOLUME).map(|moved| moved.volume.record.size_bytes)
    }

    fn grow(&mut self, random: &mut Random) {
        let blocks = self.content.len() as u64 + 1 + random.below(GROWTH_MAX);
        if blocks <= BLOCKS_MAX {
            self.content.resize(blocks as usize, 0);
            self.stay.grow(self.size());
            let size = self.size();
            self.hosts.iter_mut().for_each(|host| host.untold = Some(size));
        }
    }

    fn tell(&mut self, host: usize) -> Option<String> {
        self.offered(host)?;
        let told = self.hosts[host].untold.take()?;
        let records = vec![Record::GrewElsewhere { volume: VOLUME, size_bytes: told }];
        if let Err(error) = self.hosts[host].state.apply(&Entry { at_unix_ms: 0, records }) {
            return Some(error.to_string());
        }
        // A restart knows only the journal.
        let offered = self.offered(host)?;
        (offered < told).then(|| format!("host {host} offers {offered} bytes of {told}"))
    }

    fn restart(&mut self) {
        let believed = self.kept.clone().map(|kept| kept.with_marks(self.marks.clone()));
        self.stay = Stay::resume(beginning(self.stay.id(), self.size()), believed);
    }

    fn refer(&mut self, of: ReplicaOf, generation: Generation, missing: LayeredBitmap) {
        let premarks = self.stay.premarks();
        self.marks.push((premarks.epoch, premarks.blocks.clone()));
        let referral = self.stay.take_down(&premarks, of, generation, missing);
        if let Some(kept) = referral.and_then(|referral| self.stay.refer(referral)) {
            self.marks.retain(|(epoch, _)| *epoch > kept.through);
            self.kept = Some(kept);
        }
    }

    fn go_to(&mut self, to: usize, random: &mut Random) -> Option<String> {
        let (from, size, name) = (self.owner, self.size(), |host: usize| [host as u8; 32]);
        let known = self.hosts[to].kept.take().and_then(|(departure, generation, content)| {
            let of = ReplicaOf::Host { host: name(to), departure };
            Some((self.stay.lacking(of, generation)?, content))
        });
        let copied = match known {
            None => self.content.clone(),
            Some((lacking, mut content)) => {
                content.resize(self.content.len(), 0);
                for block in lacking.runs().flat_map(|run| run.iter()) {
                    content[block.0 as usize] = self.content[block.0 as usize];
                }
                content
            }
        };
        if copied != self.content {
            return Some(format!("host {to} has {copied:?}, and host {from} had {:?}", self.content));
        }
        let told = self.stay.departs(name(to)).map(stay::Departed::copies).unwrap_or_default();
        self.hosts[from].numbers += 1;
        let (departure, generation) = (self.hosts[from].numbers, self.generation);
        let keeps = random.percent(70);
        self.hosts[from].kept = keeps.then(|| (departure, generation, self.content.clone()));
        self.hosts[from].state.moved = BTreeMap::from([(VOLUME, moved(to, departure, size))]);
        let knew = self.offered(to).unwrap_or(size);
        self.hosts[to].state.moved.clear();
        self.hosts[to].numbers += 1;
        let stay = StayId::Arrived(self.hosts[to].numbers);
        self.stay = Stay::begin(beginning(stay, stay::size_of_arrival(size, knew)));
        (self.kept, self.marks, self.owner) = (None, Vec::new(), to);
        self.generation = generation.next();
        if keeps {
            let complete = LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(size));
            self.refer(ReplicaOf::Host { host: name(from), departure }, generation, complete);
        }
        for copy in told {
            if let Some(lacking) = self.stay.lacking_since_arrival(&copy.lacking) {
                let of = ReplicaOf::Host { host: copy.host, departure: copy.departure };
                self.refer(of, copy.generation, lacking);
            }
        }
        None
    }
}

fn moved(to: usize, departure: u64, size_bytes: u64) -> Moved {
    let record = VolumeRecord {
        volume: VOLUME,
        name: "v".to_owned(),
        size_bytes,
        block_size_bytes: BlockSize::DEFAULT.into(),
        image: ImageLocation::raw_file("", "/v"),
        generation: Generation(0),
        export: ExportSettings::default(),
    };
    Moved {
        volume: VolumeState { record, stay: StayId::Made, added_unix_ms: 0, resizing_to: None },
        migration: MigrationId(departure),
        host: HostId([to as u8; 32]),
        host_name: "b".to_owned(),
        generation: Generation(0),
        forwarding: Forwarding::Always,
        at_unix_ms: 0,
    }
}
