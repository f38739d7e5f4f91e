//! Rules that are broken on purpose. Each must be noticed: by the fleet, or by one of the separate simulations.

use migration::planted::{Bug, plant};
use pacer::planted::{Bug as PacerBug, plant as plant_in_pacer};
use standby::planted::{Bug as StandbyBug, plant as plant_in_standby};

use crate::campaign::{Order, Until};
use crate::restored::Telling;
use crate::trace::Audience;
use crate::{
    Arguments, Strategy, campaign, custody, orders, pacing, replay, restored, run_one, simulation, small,
    standbys,
};

/// The number of seeds within which a broken rule must be noticed.
const SEEDS_MAX: u64 = 10_000;

/// Rules whose breach only shows after thousands of seeds, with the first such seed. That seed is tried first, to save time; if
/// it shows nothing, all seeds are run.
const NOTICED_LATE: [(Bug, u64); 6] = [
    (Bug::FencedOnceOnly, 1827),
    (Bug::PromiseNotWithdrawn, 4067),
    (Bug::FailedFlushForgotten, 3444),
    (Bug::EndNotRepeated, 4748),
    (Bug::NotedForgotten, 1312),
    (Bug::LostWriteRecorded, 2569),
];

/// The first seed that shows [`PacerBug::StuckIsIdle`].
const STUCK_IS_IDLE_SEED: u64 = 386;

/// A seed that shows [`StandbyBug::ReturnSinceNewest`].
const RETURN_SINCE_NEWEST_SEED: u64 = 24_229;
/// A seed that notices a block being read again before the cut while an older read of it has not ended.
const EARLY_READ_TWICE_SEED: u64 = 2975;

pub(crate) fn run(arguments: &Arguments, planted: &str, seed: Option<u64>) -> bool {
    let chosen: Vec<_> = Bug::all().filter(|bug| planted == "all" || bug.name() == planted).collect();
    let of_pacer = PacerBug::ALL.into_iter().filter(|bug| planted == "all" || bug.name() == planted);
    let of_pacer: Vec<_> = of_pacer.collect();
    let of_standby = StandbyBug::ALL.iter().copied().filter(|bug| planted == "all" || bug.name() == planted);
    let of_standby: Vec<_> = of_standby.collect();
    if chosen.is_empty() && of_pacer.is_empty() && of_standby.is_empty() {
        let names = Bug::all().map(Bug::name).chain(PacerBug::ALL.map(PacerBug::name));
        let names = names.chain(StandbyBug::ALL.iter().map(|bug| bug.name()));
        println!("no rule is called {planted}: all, {}", names.collect::<Vec<_>>().join(", "));
        return false;
    }
    let mut all_noticed = true;
    for bug in of_pacer {
        all_noticed &= pacing_notices(arguments, bug, seed);
    }
    for bug in of_standby {
        all_noticed &= standbys_notice(arguments, bug, seed);
    }
    for bug in chosen {
        all_noticed &= match (Apart::of(bug), seed) {
            (Some(apart), seed) => apart.notices(arguments, bug, seed),
            (None, Some(seed)) => {
                plant(Some(bug));
                !run_one(&noticing(arguments, bug), seed)
            }
            (None, None) => is_noticed(&noticing(arguments, bug), bug),
        };
    }
    all_noticed
}

/// Runs seeds of the pacer's simulation until one notices a broken rule, or one seed.
fn pacing_notices(arguments: &Arguments, bug: PacerBug, seed: Option<u64>) -> bool {
    // A guest that is stuck beside copies for long enough to tell is rare.
    let usual = if bug == PacerBug::StuckIsIdle { STUCK_IS_IDLE_SEED } else { arguments.first };
    let (first, count) = seed.map_or((usual, SEEDS_MAX), |seed| (seed, 1));
    plant_in_pacer(Some(bug));
    let shown = pacing::campaign(first, count, true);
    plant_in_pacer(None);
    let Some((seed, violation)) = shown.violations.first() else {
        println!("{}: not noticed in {} seeds", bug.name(), shown.seeds);
        return false;
    };
    if let Some(violation) = pacing::replay(*seed, Telling::Silent) {
        println!("{}: seed {seed} violates a rule without it, too: {violation}", bug.name());
        return false;
    }
    println!("{}: noticed by seed {seed}: {violation}", bug.name());
    true
}

/// Runs seeds of the standbys' simulation until one notices a broken rule, or one seed.
fn standbys_notice(arguments: &Arguments, bug: StandbyBug, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        plant_in_standby(Some(bug));
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = standbys::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_some();
    }
    plant_in_standby(Some(bug));
    let late = match bug {
        // That an owner which serves on has sent a seal that is then lost, and is replaced, is rare.
        StandbyBug::ReturnSinceNewest => Some((RETURN_SINCE_NEWEST_SEED, 1)),
        // So is a read that outlasts a write to its block and the next read of it.
        StandbyBug::EarlyReadTwice => Some((EARLY_READ_TWICE_SEED, 1)),
        _ => None,
    };
    let mut orders = late.into_iter().chain([(arguments.first, SEEDS_MAX)]);
    let shown = orders.find_map(|(first, count)| standbys::campaign(first, count, true).violations.pop());
    plant_in_standby(None);
    let Some((seed, violation)) = shown else {
        println!("{}: not noticed in {SEEDS_MAX} seeds", bug.name());
        return false;
    };
    if let Some(violation) = standbys::replay(seed, Telling::Silent) {
        println!("{}: seed {seed} violates a rule without it, too: {violation}", bug.name());
        return false;
    }
    println!("{}: noticed by seed {seed}: {violation}", bug.name());
    true
}

fn noticing(arguments: &Arguments, bug: Bug) -> Arguments {
    let hosts = match bug {
        // Only a migration between hosts outlasts a daemon, returns to guests, or has clients at two hosts.
        Bug::ClaimsAtEachHost
        | Bug::MarkNotAwaited
        | Bug::EpochReused
        | Bug::EpochsReservedLate
        | Bug::TouchedImageTrusted
        | Bug::OpenOnTrial
        | Bug::FenceNotChecked
        | Bug::FencedOnceOnly
        | Bug::DiscardedBeforeNoted
        | Bug::EndNotRepeated
        | Bug::VmLeavesUnnoted
        | Bug::HooksNotAwaited
        | Bug::ColdVmKeptAfterAnswer
        | Bug::ColdVmNotAskedAgain
        | Bug::PromiseForgotten
        | Bug::ConfirmedTooLate
        | Bug::TryNotCounted
        | Bug::PromiseOfAnotherIncarnation
        | Bug::AbortNotRecorded => 2,
        // Two branches need a third host to pass each other, and so does a return after another target.
        Bug::AccessAfterTheRelationEnded
        | Bug::AttachmentOutlivesItsEnd
        | Bug::ReadOnlyAttachmentWrites
        | Bug::BranchMistaken
        | Bug::ChronicleIsMissingSet
        | Bug::ToldCopyForgetsWrites
        | Bug::FailedFlushForgotten
        | Bug::ForgetAfterRefer
        | Bug::PromiseNotWithdrawn
        | Bug::MarksOfAnEarlierStay
        | Bug::IncompletePromoted => 3,
        _ => arguments.hosts,
    };
    // Incomplete handovers: in every simulation, at once, to another host.
    let leaves = matches!(
        bug,
        Bug::PresentBeforeDurable
            | Bug::FillOverNewerWrite
            | Bug::PresenceForgotten
            | Bug::WriteNotNoted
            | Bug::NotedForgotten
            | Bug::LostWriteRecorded
            | Bug::ReadPassesOverwriting
            | Bug::PresenceNeedsSpace
            | Bug::NotesLeftOut
            | Bug::RetiredBeforeWhole
            | Bug::ManifestOlderThanGate
            | Bug::ReservoirDiscarded
            | Bug::HollowImageKept
    );
    // A copy that counts as complete although the owner's disk has lost data: rare, unless all is copied before the handover.
    if bug == Bug::FailedFlushForgotten {
        return Arguments { hosts, strategy: Some(Strategy::Tracking), ..arguments.clone() };
    }
    if leaves {
        return Arguments { hosts: 2, strategy: Some(Strategy::PostCopy), ..arguments.clone() };
    }
    Arguments { hosts, ..arguments.clone() }
}

/// Runs seeds until one notices a broken rule; returns whether there is one which keeps all rules otherwise.
fn is_noticed(arguments: &Arguments, bug: Bug) -> bool {
    let all = arguments.order(SEEDS_MAX, Until::OneIsFound);
    let is_one = |seed: u64| (all.first..all.first.saturating_add(all.count)).contains(&seed);
    let late = NOTICED_LATE.iter().find(|(late, seed)| *late == bug && is_one(*seed));
    let late = late.map(|(_, seed)| Order { first: *seed, count: 1, ..all.clone() });
    let mut seeds = 0;
    for order in late.into_iter().chain([all]) {
        let summary = campaign::run(&order, || plant(Some(bug)));
        seeds += summary.seeds;
        let Some((seed, violation)) = summary.violations.first() else { continue };
        if violates_anyway(arguments, *seed) {
            println!("{}: seed {seed} violates a rule without it, too", bug.name());
            return false;
        }
        println!("{}: noticed by seed {seed} ({}): {}", bug.name(), violation.checker, violation.detail);
        println!("    {}", replay(arguments, *seed, &format!(" --planted {}", bug.name())));
        return true;
    }
    println!("{}: not noticed in {seeds} seeds", bug.name());
    false
}

/// A simulation apart from the fleet: runs seeds from the first one until one shows something, or one seed.
struct Apart {
    /// How many seeds were run, and the one that shows something.
    campaign: fn(u64, u64) -> (u64, Option<(u64, String)>),
    replay: fn(u64, Telling) -> Option<String>,
}

const RESTORATION: Apart = Apart {
    campaign: |first, count| {
        let shown = restored::campaign(first, count, true);
        (shown.seeds, shown.violations.into_iter().next())
    },
    replay: restored::replay,
};
const SMALL: Apart = Apart {
    campaign: |first, count| {
        let shown = small::campaign(first, count, true);
        (shown.seeds, shown.violations.into_iter().next())
    },
    replay: small::replay,
};
const CUSTODY: Apart = Apart {
    campaign: |first, count| {
        let shown = custody::campaign(first, count, true);
        (shown.seeds, shown.violations.into_iter().next())
    },
    replay: custody::replay,
};
const ORDERS: Apart = Apart {
    campaign: |first, count| {
        let shown = orders::campaign(first, count, true);
        (shown.seeds, shown.violations.into_iter().next())
    },
    replay: orders::replay,
};

impl Apart {
    /// Returns the simulation that has to notice a bug; `None`: the fleet.
    fn of(bug: Bug) -> Option<Self> {
        let all = [
            (Bug::OF_RESTORATION, RESTORATION),
            (Bug::OF_SHARES, SMALL),
            (Bug::OF_CUSTODY, CUSTODY),
            (Bug::OF_ORDERS, ORDERS),
        ];
        all.into_iter().find(|(bugs, _)| bugs.contains(&bug)).map(|(_, apart)| apart)
    }

    fn notices(&self, arguments: &Arguments, bug: Bug, seed: Option<u64>) -> bool {
        plant(Some(bug));
        if let Some(seed) = seed {
            let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
            let violation = (self.replay)(seed, telling);
            println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
            return violation.is_some();
        }
        let (seeds, shown) = (self.campaign)(arguments.first, SEEDS_MAX);
        plant(None);
        let Some((seed, violation)) = shown else {
            println!("{}: not noticed in {seeds} seeds", bug.name());
            return false;
        };
        if (self.replay)(seed, Telling::Silent).is_some() {
            println!("{}: seed {seed} violates a rule without it, too", bug.name());
            return false;
        }
        println!("{}: noticed by seed {seed}: {violation}", bug.name());
        true
    }
}

/// Returns whether a seed violates a rule even without the planted bug, and so proves nothing.
fn violates_anyway(arguments: &Arguments, seed: u64) -> bool {
    plant(None);
    simulation::simulate(seed, &arguments.options(), Audience::Nobody).violation.is_some()
}
