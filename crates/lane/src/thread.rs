//! The thread of a volume: its executor, its export, and its messages.
//!
//! ```text
//!   started ──► serving ──stop──► draining: no new requests, those in flight end ──► store flushed ──► ended
//! ```
//! A [`Lane`] knows neither its thread nor files nor sockets: [`start`] gives it an engine and front ends, and opens stores.

mod driving;
mod filling;
mod growing;
mod incoming;
mod local;
mod outgoing;
mod standing_by;
mod stopping;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use block::device::ALIGNMENT;
use block::engine::{Engine, EngineChoice, EngineError};
use block::filter::Aligner;
use block::{BlockDevice, Executor, Geometry, Handle, IoError};
use chronicle::{Chronicle, Epoch, MarkPolicy, StayId};
use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt;
use migration::stay::Beginning;
use tracing::{info, warn};

use crate::chronicler::{Chronicler, Keeping};
use crate::control::Control;
use crate::filling::FillingStore;
use crate::front_end::{self, FrontEnd};
use crate::handle::{Command, LaneHandle, LaneSettings, LaneStore, Listeners, Opening, Rest};
use crate::peer::{RpcChannel, Service};
use crate::pulse::Pulse;
use crate::refused::Refused;
use crate::reservoir::Reservoir;
use crate::shared_storage::LeasedImage;
use crate::stack::{ClientStacks, Counters, Home, Measures, Volume};
use crate::status::LaneStatus;

use self::driving::CurrentMigration;
pub use self::incoming::Arriving;
pub use self::outgoing::Departing;

/// Stack of a lane's thread: its futures are on the heap, so little is needed.
const STACK_BYTES: usize = 512 << 10;
const MISSING_RUNS_TOLD: usize = 256;

/// The reason why a lane cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The thread could not be made.
    #[error("start a thread for the volume")]
    Thread(#[source] std::io::Error),
    /// No I/O engine could be opened.
    #[error("open an I/O engine")]
    Engine(#[source] EngineError),
    /// The opened store cannot be made a device.
    #[error("open the store")]
    Store(#[source] IoError),
    /// The thread ended before it served anything.
    #[error("start the volume: its thread ended at once")]
    EndedAtOnce,
}

/// Starts the thread of a volume, which serves `store` on `listeners` under the volume's name. `control` is called
/// on the new thread.
///
/// # Errors
/// [`LaneError`]; nothing is left of the lane then.
pub fn start(
    settings: LaneSettings,
    store: LaneStore,
    listeners: Listeners,
    engine: EngineChoice,
    control: impl FnOnce() -> Rc<dyn Control> + Send + 'static,
) -> Result<LaneHandle, LaneError> {
    let (commands, received) = mpsc::unbounded();
    let (alive, ended) = oneshot::channel();
    let (started, starting) = std::sync::mpsc::sync_channel(1);
    let name = settings.name.clone();
    std::thread::Builder::new()
        .name(format!("lane {name}"))
        .stack_size(STACK_BYTES)
        .spawn(move || {
            // Dropped at the end of the thread, even by a panic.
            let _alive = alive;
            // An engine belongs to the thread that opens it.
            let (driver, engine) = match block::engine::open(engine) {
                Ok(opened) => opened,
                Err(error) => {
                    // The caller of `start` waits for this.
                    let _ = started.send(Err(LaneError::Engine(error)));
                    return;
                }
            };
            let mut executor = Executor::new(driver);
            let (handle, control) = (executor.handle(), control());
            let told = Rc::clone(&control);
            let closed = executor.run(async move {
                let opened = open_store(store, &settings, &handle, &engine, &control).await;
                let Opened { home, leased, filling } = match opened {
                    Ok(opened) => opened,
                    Err(error) => {
                        let _ = started.send(Err(LaneError::Store(error)));
                        return None;
                    }
                };
                let with = LaneSurroundings { handle, engine, control };
                let lane = Lane::new(&with, settings, home, |with, settings, stacks| {
                    front_end::begin(&with.handle, &with.engine, settings, stacks, listeners)
                });
                lane.leased.replace(leased);
                if let Some(filling) = filling {
                    lane.lacks_blocks_of(filling);
                }
                let _ = started.send(Ok(()));
                lane.run(received).await
            });
            drop(executor);
            if let Some(stay) = closed {
                told.store_closed(stay);
            }
        })
        .map_err(LaneError::Thread)?;
    starting.recv().map_err(|_| LaneError::EndedAtOnce)??;
    Ok(LaneHandle::new(commands, ended))
}

async fn open_store(
    store: LaneStore,
    settings: &LaneSettings,
    handle: &Handle,
    engine: &Rc<dyn Engine>,
    control: &Rc<dyn Control>,
) -> Result<Opened, IoError> {
    let of = |home| Opened { home, leased: None, filling: None };
    match store {
        LaneStore::Here(opened) => Ok(of(Home::Here(opened.into_device(handle, engine).await?))),
        LaneStore::Filling(order) => {
            let filling = filling::reopen(*order, settings, handle, engine, control).await?;
            let home = Home::Here(Rc::clone(&filling) as Rc<dyn BlockDevice>);
            Ok(Opened { home, leased: None, filling: Some(filling) })
        }
        LaneStore::Arriving(store) => {
            let (store, leased) = store.into_device(handle, engine).await?;
            Ok(Opened { home: Home::Here(store), leased, filling: None })
        }
        LaneStore::Elsewhere { channel, size_bytes } => {
            let geometry =
                Geometry { size: size_bytes, alignment: ALIGNMENT, read_only: false, discards: true };
            let owner =
                outgoing::owner_elsewhere(handle, engine.buffers(), settings.volume, channel, geometry);
            Ok(of(Home::Elsewhere(owner)))
        }
    }
}

struct Opened {
    home: Home,
    leased: Option<Rc<LeasedImage>>,
    filling: Option<Rc<FillingStore>>,
}

/// What a lane works with.
#[derive(Clone)]
pub struct LaneSurroundings {
    /// Runs its tasks, and has its clock.
    pub handle: Handle,
    /// Opens files, and has the buffers of its requests.
    pub engine: Rc<dyn Engine>,
    /// Its control plane.
    pub control: Rc<dyn Control>,
}

/// A volume with all that serves and moves it, on one thread.
pub struct Lane {
    handle: Handle,
    engine: Rc<dyn Engine>,
    control: Rc<dyn Control>,
    settings: LaneSettings,
    volume: Rc<Volume>,
    counters: Rc<Counters>,
    pulse: Rc<Pulse>,
    front_ends: Vec<Box<dyn FrontEnd>>,
    /// Other hosts that use the volume for their remaining clients.
    attached: RefCell<Vec<(Rc<RpcChannel>, Rc<Service>)>>,
    migration: Rc<CurrentMigration>,
    /// The store that it began with, if that may be leased to the volume's source host.
    leased: RefCell<Option<Rc<LeasedImage>>>,
    /// The store of a volume that arrived incomplete, or may.
    filling: RefCell<Option<Rc<FillingStore>>>,
    /// Serves missing blocks to the new owner of the volume.
    reservoir: Rc<Reservoir>,
    is_growing: Cell<bool>,
    is_duplicating: Cell<bool>,
    /// Measures guests for the pacers of the disks that the volume is on.
    gauge: Rc<pacer::Gauge>,
    /// The disk that the volume is on, or comes to.
    disk: Rc<RefCell<Arc<pacer::Store>>>,
    /// Paces what is read for the volume's standby.
    standby_mover: RefCell<pacer::Mover>,
}

impl Lane {
    /// Makes the lane of a volume that is at `home`. `front_ends` is called once, for what accepts its clients.
    pub fn new(
        surroundings: &LaneSurroundings,
        mut settings: LaneSettings,
        home: Home,
        front_ends: impl FnOnce(&LaneSurroundings, &LaneSettings, &ClientStacks) -> Vec<Box<dyn FrontEnd>>,
    ) -> Rc<Self> {
        let LaneSurroundings { handle, engine, control } = surroundings.clone();
        let size = home.device().geometry().size;
        let id = settings.volume;
        let chronicler = match control.keeper() {
            Some(keeper) => {
                let kept = settings.kept.take().map(|kept| *kept);
                let beginning = Beginning {
                    id: settings.stay,
                    block_size: settings.block_size,
                    size_bytes: size,
                    regions: settings.marks.unwrap_or(MarkPolicy::regions_for(settings.block_size, size)),
                };
                let wait_max = settings.limits.mirror_wait_max;
                Chronicler::kept(id, beginning, kept, Keeping { keeper, handle: handle.clone(), wait_max })
            }
            // Writes before this start are unknown: every block may have been written.
            None => Chronicler::volatile(id, Chronicle::resume(settings.block_size, size, Epoch(0))),
        };
        let aligner = Aligner::new(engine.buffers().clone(), handle.clone());
        let volume = Volume::with_chronicler(id, chronicler, settings.generation, home, aligner);
        volume.fencing().begin(settings.life);
        let counters = Rc::<Counters>::default();
        let pulse = Rc::new(Pulse::new(handle.now(), Rc::clone(&counters)));
        if settings.opening != Opening::Serving {
            drop(volume.close());
        }
        let gauge = Rc::<pacer::Gauge>::default();
        gauge.join(&settings.disk);
        let measures =
            Measures { counters: Rc::clone(&counters), pulse: Rc::clone(&pulse), gauge: Rc::clone(&gauge) };
        let stacks = ClientStacks::new(&settings.name, Rc::clone(&volume), measures, handle.clone());
        let front_ends = front_ends(surroundings, &settings, &stacks);
        let disk = Rc::new(RefCell::new(Arc::clone(&settings.disk)));
        let terms = settings.impact.map(|impact| pacer::Terms { class: pacer::MoverClass::Standby, impact });
        let disks = pacer::Stores::default().and(Arc::clone(&settings.disk));
        let standby_mover = RefCell::new(pacer::Mover::when_asked(disks, terms));
        Rc::new(Self {
            handle,
            engine,
            control,
            settings,
            volume,
            counters,
            pulse,
            front_ends,
            attached: RefCell::default(),
            migration: Rc::default(),
            leased: RefCell::default(),
            filling: RefCell::default(),
            reservoir: Rc::default(),
            is_growing: Cell::new(false),
            is_duplicating: Cell::new(false),
            gauge,
            disk,
            standby_mover,
        })
    }

    /// Begins what a lane does unasked.
    pub fn begin(self: &Rc<Self>) {
        self.forget_ended_copies();
        self.handle.spawn(Rc::clone(self).follow_growth());
    }

    /// Serves until ordered to stop, or until no handle is left; returns the residency if it was closed in order.
    async fn run(self: Rc<Self>, mut commands: mpsc::UnboundedReceiver<Command>) -> Option<StayId> {
        info!(volume = %self.settings.name, engine = self.engine.name(), "serving");
        self.begin();
        while let Some(command) = commands.next().await {
            // The asker may have gone; then the answer is not needed.
            match command {
                Command::Migrate { order, target, answer } => {
                    let lane = Rc::clone(&self);
                    // A store that is slow to open must not delay other commands.
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.migrate(&order, target).await);
                    });
                }
                Command::Leave { order, channels, role, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        if order.recorded.is_some() {
                            lane.let_arrival_end().await;
                        }
                        let _ = answer.send(lane.leave(&order, channels, role));
                    });
                }
                Command::Come { order, store, channels, role, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.come(&order, store, channels, role).await);
                    });
                }
                Command::SetAside { migration, aside, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.set_aside(migration, aside).await);
                    });
                }
                Command::Attach { channel, peer, own } => self.attach(channel, peer, own),
                Command::ServeReservoir { channel, migration, index } => {
                    self.serve_reservoir(channel, migration, index);
                }
                Command::Cancel { migration, answer } => {
                    let _ = answer.send(self.cancel(migration));
                }
                Command::Fail { migration, code, detail, answer } => {
                    let _ = answer.send(self.with_migration(migration, |driver| {
                        if driver.fail(code, detail) { Ok(()) } else { Err(Refused::TooLate(migration)) }
                    }));
                }
                Command::Rest { migration, rest, answer } => {
                    let _ = answer.send(self.with_migration(migration, |driver| {
                        match rest {
                            Rest::Pause => driver.pause(),
                            Rest::Resume => driver.resume(),
                        }
                        Ok(())
                    }));
                }
                Command::Promote { migration, promoted, answer } => {
                    let _ = answer.send(self.promote(migration, *promoted));
                }
                Command::ForgetCopy { of, answer } => {
                    let volume = Rc::clone(&self.volume);
                    self.handle.spawn(async move {
                        if let Err(error) = volume.chronicler().forget(of).await {
                            warn!(%error, "cannot forget the missing set of a copy that is gone; a restart finds it again");
                        }
                        let _ = answer.send(());
                    });
                }
                Command::GiveUpMissing { answer } => {
                    if let Some(filling) = &*self.filling.borrow() {
                        filling.give_up_missing();
                    }
                    let _ = answer.send(());
                }
                Command::LimitWaits { to, answer } => {
                    if let Some(filling) = &*self.filling.borrow() {
                        filling.limit_waits(to);
                    }
                    let _ = answer.send(());
                }
                Command::SetBandwidth { migration, bytes_per_second, answer } => {
                    let _ = answer.send(self.with_migration(migration, |driver| {
                        driver.set_bandwidth(bytes_per_second);
                        Ok(())
                    }));
                }
                Command::SetImpact { migration, impact, answer } => {
                    let _ = answer.send(self.with_migration(migration, |driver| {
                        driver.set_impact(impact);
                        Ok(())
                    }));
                }
                Command::Duplicate(ordered, answer) => {
                    let lane = Rc::clone(&self);
                    let (order, target, line) = *ordered;
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.duplicate(order, target, line).await);
                    });
                }
                Command::Revert(snapshot, shared, answer) => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.revert(snapshot, &shared).await);
                    });
                }
                Command::Grow { size, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.grow(size).await);
                    });
                }
                Command::Status { answer } => {
                    let _ = answer.send(self.status());
                }
                Command::Written { answer } => {
                    let written = self.counters.writing.borrow_mut().written(self.handle.now());
                    let _ = answer.send(written);
                }
                Command::Capture { order, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.capture(order).await);
                    });
                }
                Command::ReadForStandby { blocks, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.read_for_standby(blocks).await);
                    });
                }
                Command::FlushForStandby { answer } => {
                    let store = self.volume.is_here().then(|| self.volume.store_for_us());
                    self.handle.spawn(async move {
                        let flushed = match store {
                            Some(store) => store.flush().await.is_ok(),
                            None => false,
                        };
                        let _ = answer.send(flushed);
                    });
                }
                Command::ForgetForStandby { of, answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        let _ = answer.send(lane.forget_for_standby(of).await);
                    });
                }
                Command::Settle { answer } => {
                    let lane = Rc::clone(&self);
                    self.handle.spawn(async move {
                        if matches!(lane.volume.home(), Home::Here(_)) {
                            // The final flush reports a failure.
                            let _ = lane.volume.store_for_us().flush().await;
                        }
                        let _ = answer.send(());
                    });
                }
                Command::Stop { deadline, clients, answer } => {
                    let (closed, passed) = self.stop(deadline, clients).await;
                    let _ = answer.send(passed);
                    return closed;
                }
            }
        }
        None
    }

    fn status(&self) -> LaneStatus {
        let counters = &self.counters;
        LaneStatus {
            engine: self.engine.name(),
            connections: self.front_ends.iter().map(|front_end| front_end.clients()).sum(),
            client_processes: self.front_ends.iter().flat_map(|front_end| front_end.processes()).collect(),
            clients_elsewhere: self.volume.clients().elsewhere(),
            led_here_by: self.volume.clients().ways(),
            awaits_word_of_clients: self.volume.clients().awaits_word(self.handle.now()),
            // Requests of other hosts' clients are not counted above the gate.
            requests_in_flight: counters.in_flight.get().max(self.volume.gate().in_flight()),
            reads: counters.reads.get(),
            writes: counters.writes.get(),
            flushes: counters.flushes.get(),
            bytes_read: counters.bytes_read.get(),
            bytes_written: counters.bytes_written.get(),
            errors: counters.errors.get(),
            last_error: counters.last_error.borrow().as_ref().map(ToString::to_string),
            latencies: self.pulse.latencies(),
            generation: self.volume.generation().0,
            copies: self.volume.chronicler().copies(self.volume.generation()),
            filling: self.filling.borrow().as_ref().and_then(|filling| filling.progress()),
            missing: match &*self.filling.borrow() {
                Some(filling) => filling.first_missing(MISSING_RUNS_TOLD),
                None => Vec::new(),
            },
        }
    }
}
