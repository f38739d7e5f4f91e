//! The suite that every [`BlockDevice`] passes: stores, filters, and devices of other crates.
//!
//! ```no_run
//! # async fn example(executor: block::Handle) {
//! use std::rc::Rc;
//! use block::{MemoryStore, conformance::Suite};
//!
//! Suite::new("memory", executor, |size| Rc::new(MemoryStore::new(size))).run().await;
//! # }
//! ```
//!
//! It is for tests, and panics at the first violation with the device, the case and any seed. It does not check times or
//! durability; the simulator does that with power cuts. For devices above a store, [`check_failed_flushes`] checks that a failed
//! flush is reported as a loss.

#![expect(clippy::panic, reason = "a violation ends the test, like a failed assertion")]

mod cases;
mod forgetful;
mod model;

use std::rc::Rc;

pub use forgetful::{Forgetful, check_failed_flushes};

use crate::device::BlockDevice;
use crate::executor::Handle;

/// Sizes in bytes of the tested devices: one block, many, and sizes that end within a block or a sector.
const SIZES: [u64; 5] = [4096, 256 << 10, (256 << 10) + 512, (96 << 10) + 1, 4095];

const OPERATIONS: usize = 300;

/// The suite for one kind of device.
pub struct Suite<F> {
    name: String,
    handle: Handle,
    factory: F,
    sizes: Vec<u64>,
    seed: u64,
    operations: usize,
}

impl<F: FnMut(u64) -> Rc<dyn BlockDevice>> Suite<F> {
    /// Makes a suite for the devices of `factory`: writable, of the given size in bytes, and all zero. `handle` is the executor's
    /// that runs the suite.
    pub fn new(name: &str, handle: Handle, factory: F) -> Self {
        let sizes = SIZES.to_vec();
        Self { name: name.to_owned(), handle, factory, sizes, seed: 1, operations: OPERATIONS }
    }

    /// Sets the sizes of the tested devices.
    #[must_use]
    pub fn sizes(mut self, sizes: &[u64]) -> Self {
        self.sizes = sizes.to_vec();
        self
    }

    /// Sets the seed of the random operations.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of random operations on each device.
    #[must_use]
    pub fn operations(mut self, operations: usize) -> Self {
        self.operations = operations;
        self
    }

    /// Runs every case on new devices of every size.
    ///
    /// # Panics
    /// If a device breaks its contract.
    pub async fn run(mut self) {
        for size in self.sizes.clone() {
            let mut make = |case: &str| {
                let device = (self.factory)(size);
                let scene = format!("{} of {size} bytes, {case}", self.name);
                assert_eq!(device.geometry().size, size, "{scene}");
                assert!(!device.geometry().read_only, "{scene}: a writable device is asked for");
                cases::Subject { device, scene, handle: self.handle.clone() }
            };
            make("geometry").geometry();
            make("new").reads_as_zeroes().await;
            make("boundaries").boundaries().await;
            make("requests of no bytes").empty_requests().await;
            make("refusals").refusals().await;
            make("overlaps in sequence").overlaps_in_sequence().await;
            make("many in flight").many_in_flight().await;
            make("overlaps in flight").overlaps_in_flight().await;
            make("zeroes").zeroes().await;
            make("dropped futures").dropped_futures().await;
            make("growth").growth().await;
            let seed = self.seed;
            make(&format!("random operations, seed {seed}")).random(seed, self.operations).await;
        }
    }
}

/// Checks that a read-only device refuses every change and still reads.
///
/// # Panics
/// If the device does not.
pub async fn check_read_only(name: &str, device: Rc<dyn BlockDevice>) {
    assert!(device.geometry().read_only, "{name}");
    cases::check_read_only(name, &*device).await;
}
