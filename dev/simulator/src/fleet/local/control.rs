//! What lanes order during a migration within one host: work on images fails, hangs or takes long; messages between the
//! halves come late, twice or never.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;
use std::time::Duration;

use futures_channel::oneshot;
use futures_util::future::select;
use lane::{ControlFault, LaneFuture};
use migration::Phase;
use migration::journal::ImageLocation;
use migration::recovery::Retirement;

use crate::faults::Fault;
use crate::fleet::host::SimHost;
use crate::random::Random;
use crate::world::World;

const FILE_WORK: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(5));
const MESSAGE: Duration = Duration::from_micros(200);
/// The time of a message with a fault: longer than an attempt at the handover.
const LATE_MESSAGE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(4));
/// The pause before an unanswered message is repeated; it excuses a guest's wait.
const REPEAT_PAUSE: Duration = Duration::from_millis(250);

/// The phases of messages between the halves: a message held until one of them is entered again meets the next attempt.
const HANDOVER: [Phase; 4] = [Phase::Closing, Phase::Preparing, Phase::Releasing, Phase::Committing];

const FILE_HANG: Duration = Duration::from_secs(5);

#[derive(Clone, Copy)]
struct FileFaults {
    fails: Fault,
    slow: Fault,
    hangs: Option<Fault>,
}

pub(in crate::fleet) struct LocalControl {
    host: Weak<SimHost>,
    world: Rc<World>,
    random: RefCell<Random>,
    incarnation: u64,
}

impl LocalControl {
    pub(in crate::fleet) fn new(host: &SimHost) -> Rc<Self> {
        let random = RefCell::new(host.random.borrow_mut().fork());
        let (world, incarnation) = (Rc::clone(&host.world), host.incarnation());
        Rc::new(Self { host: Weak::clone(&host.me), world, random, incarnation })
    }

    fn file_work(
        &self,
        operation: &'static str,
        image: ImageLocation,
        faults: FileFaults,
        work: impl FnOnce(&SimHost, &str) + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        let (sender, receiver) = oneshot::channel();
        let (picked_up, mut takes) = {
            let mut random = self.random.borrow_mut();
            (random.duration(FILE_WORK.0, FILE_WORK.1), random.duration(FILE_WORK.0, FILE_WORK.1))
        };
        // Work begun by a killed daemon may still be done.
        let survives = self.random.borrow_mut().percent(50);
        let (host, world, incarnation) = (Weak::clone(&self.host), Rc::clone(&self.world), self.incarnation);
        let era = self.world.era();
        let finish = move |world: &World, fails: bool| {
            let Some(host) = host.upgrade() else { return };
            if host.incarnation() != incarnation && !survives {
                return;
            }
            let result = if fails {
                world.struck_late(faults.fails, era);
                host.local.excuse(image.place.name());
                Err(ControlFault { operation, path: image.place.name().to_owned(), detail: "EIO".to_owned() })
            } else {
                work(&host, image.place.name());
                Ok(())
            };
            let _ = sender.send(result);
        };
        self.world.clock.after(picked_up, move || {
            if world.strikes(faults.slow) {
                world.struck_late(faults.slow, era);
                takes *= 100;
            }
            if faults.hangs.is_some_and(|hangs| world.strikes(hangs)) {
                world.struck_late(Fault::TargetHang, era);
                takes = FILE_HANG;
            }
            let fails = world.strikes(faults.fails);
            let clock = Rc::clone(&world.clock);
            clock.after(takes, move || finish(&world, fails));
        });
        Box::pin(async move {
            match receiver.await {
                Ok(result) => result,
                // The helper thread died with its daemon, and with it the waiting task.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn hold_until(&self, random: &mut Random) -> Phase {
        match self.world.phase() {
            // Repeated messages lead there first.
            Some(Phase::Committing) if random.percent(30) => Phase::Retiring,
            // A message of an abandoned attempt meets the next one where it would fit best.
            Some(phase) if random.percent(40) => phase,
            _ if random.percent(75) => random.pick(&HANDOVER),
            _ => random.pick(&Phase::ALL),
        }
    }

    /// Returns the journey of a message that arrives when a phase is entered, or very late.
    fn journey_until(&self, phase: Phase) -> LaneFuture<()> {
        let (entered, late) = (self.world.hold_until(phase), self.journey(LATE_MESSAGE.1));
        let (world, era) = (Rc::clone(&self.world), self.world.era());
        Box::pin(async move {
            select(entered, late).await;
            world.struck_message(era);
        })
    }

    fn journey(&self, takes: Duration) -> LaneFuture<()> {
        let (sender, mut receiver) = oneshot::channel::<()>();
        self.world.clock.after(takes, move || {
            let _ = sender.send(());
        });
        Box::pin(poll_fn(move |context| match std::pin::Pin::new(&mut receiver).poll(context) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }))
    }
}

impl LocalControl {
    /// See [`lane::Control::retire`].
    pub(in crate::fleet) fn retire(
        &self,
        image: ImageLocation,
        retirement: Retirement,
    ) -> LaneFuture<Result<(), ControlFault>> {
        let faults = FileFaults { fails: Fault::SourceError, slow: Fault::SourceSlow, hangs: None };
        self.file_work("retire", image, faults, move |host, path| match retirement {
            Retirement::Delete => host.delete_image(path),
            Retirement::Keep => host.put_aside(path),
        })
    }

    /// See [`lane::Control::discard`].
    pub(in crate::fleet) fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        let (fails, slow, hangs) = (Fault::TargetError, Fault::TargetSlow, Some(Fault::TargetHang));
        self.file_work("delete", image, FileFaults { fails, slow, hangs }, SimHost::delete_image)
    }

    /// See [`lane::Control::carry`].
    pub(in crate::fleet) fn carry(&self) -> Option<Vec<LaneFuture<()>>> {
        let mut random = self.random.borrow_mut();
        if !self.world.strikes(Fault::MessageMishap) {
            // On one host there is no journey; between two hosts it takes a moment.
            let takes = Duration::from_nanos(random.below(MESSAGE.as_nanos() as u64));
            return random.percent(70).then(|| vec![self.journey(takes)]);
        }
        self.world.struck(Fault::MessageMishap);
        if random.percent(60) {
            let phase = self.hold_until(&mut random);
            let now = self.world.now();
            self.world.excuses.borrow_mut().add(now, now + REPEAT_PAUSE);
            return Some(vec![self.journey_until(phase)]);
        }
        let late = |random: &mut Random| random.duration(LATE_MESSAGE.0, LATE_MESSAGE.1);
        let journeys = match random.below(5) {
            0 => Vec::new(),
            1 => vec![late(&mut random), Duration::ZERO],
            _ => vec![late(&mut random)],
        };
        let now = self.world.now();
        let first = journeys.iter().min().copied().unwrap_or(Duration::MAX).min(REPEAT_PAUSE);
        self.world.excuses.borrow_mut().add(now, now + first);
        drop(random);
        let late = |takes: Duration| {
            let (journey, world, era) = (self.journey(takes), Rc::clone(&self.world), self.world.era());
            Box::pin(async move {
                journey.await;
                world.struck_message(era);
            }) as LaneFuture<()>
        };
        Some(journeys.into_iter().map(late).collect())
    }
}
