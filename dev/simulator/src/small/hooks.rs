//! Hooks of VMs whose daemon is killed at any instant. Processes outlive it, except those behind a gate.
//!
//! Checked: a hook begins once, alone among those of its VM, and after the end of the one before it. A hook that has begun is
//! followed by the hook that comes after it, and no other is. A process behind its gate is not overdue. Each requester of a hook
//! gets its result.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use migration::MigrationId;
use migration::hooks::{
    HookAction, HookBook, HookCourse, HookEnd, HookEvent, HookProcess, HookRecord, KillReason, Moment,
};

use super::Shown;
use crate::random::Random;
use crate::restored::Telling;

const STEPS: u32 = 400;
/// Steps without kills at the end: enough for everything to end.
const CALM_STEPS: u32 = 600;
const STEP: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(12);
const TAKES_MAX: u64 = 20;
const VMS: u64 = 2;
/// The percentage of migrations with unfinished hooks which a starting daemon continues.
const GOES_ON_PERCENT: u64 = 30;

pub(super) struct World {
    random: Random,
    now: Duration,
    book: Option<HookBook>,
    tasks: Vec<Task>,
    writes: VecDeque<(MigrationId, u64, Option<HookRecord>)>,
    records: BTreeMap<MigrationId, HookRecord>,
    migrations: BTreeMap<MigrationId, Migration>,
    processes: BTreeMap<i32, Process>,
    next: i32,
    kills: u64,
    violation: Option<String>,
    telling: Telling,
}

struct Migration {
    vm: String,
    has_ended: bool,
    /// It waits for what runs before it.
    asked_before: bool,
}

struct Process {
    of: (MigrationId, Moment),
    has_begun: bool,
    ends_at: Option<Duration>,
    end: Option<HookEnd>,
    is_alive: bool,
}

enum Task {
    Prepare(MigrationId, Moment),
    Release(MigrationId, Moment),
    Watch(MigrationId, Moment, i32),
}

impl World {
    pub(super) fn run(seed: u64, telling: Telling, shown: &mut Shown) -> Option<String> {
        let mut world = Self {
            random: Random::new(seed ^ 0x4005),
            now: Duration::ZERO,
            book: Some(HookBook::new(LIMIT)),
            tasks: Vec::new(),
            writes: VecDeque::new(),
            records: BTreeMap::new(),
            migrations: BTreeMap::new(),
            processes: BTreeMap::new(),
            next: 1,
            kills: 0,
            violation: None,
            telling,
        };
        for step in 0..STEPS + CALM_STEPS {
            world.step(step < STEPS);
            if world.violation.is_some() {
                break;
            }
        }
        world.check_followed();
        world.check_told();
        shown.hooks_begun += world.processes.values().filter(|process| process.has_begun).count() as u64;
        shown.kills += world.kills;
        world.violation
    }

    fn step(&mut self, is_stormy: bool) {
        self.now += STEP;
        self.end_processes();
        if self.book.is_none() {
            if !is_stormy || self.random.percent(30) {
                self.start();
            }
            return;
        }
        match self.random.below(100) {
            0..=7 if is_stormy => self.order(),
            8..=11 if is_stormy => return self.kill(),
            12..=15 => self.give_up(),
            16..=70 => self.do_something(),
            _ => {}
        }
        if self.random.percent(60) {
            self.write();
        }
        if let Some(book) = &mut self.book {
            book.handle_timeout(self.now);
        }
        self.take_actions();
        self.watch();
    }

    fn order(&mut self) {
        let id = MigrationId(self.migrations.len() as u64);
        let vm = format!("vm{}", self.random.below(VMS));
        self.migrations.insert(id, Migration { vm: vm.clone(), has_ended: false, asked_before: true });
        if let Some(book) = &mut self.book {
            book.expect(id, [vm].into());
        }
        self.tell(id, HookEvent::Wanted(Moment::Before));
    }

    fn give_up(&mut self) {
        let open: Vec<_> =
            self.migrations.iter().filter(|(_, known)| !known.has_ended).map(|(id, _)| *id).collect();
        if !open.is_empty() {
            let id = self.random.pick(&open);
            self.tell(id, HookEvent::Unwanted);
            self.ends(id);
        }
    }

    fn ends(&mut self, id: MigrationId) {
        if let Some(known) = self.migrations.get_mut(&id) {
            known.has_ended = true;
        }
        self.tell(id, HookEvent::Wanted(Moment::After));
    }

    fn kill(&mut self) {
        self.say(|| "the daemon is killed".to_owned());
        self.kills += 1;
        self.book = None;
        self.tasks.clear();
        while let Some((id, _, record)) = self.writes.pop_front() {
            if self.random.percent(50) {
                self.writes.clear();
                break;
            }
            self.durable(id, record);
        }
        for process in self.processes.values_mut().filter(|process| !process.has_begun) {
            process.is_alive = false;
        }
    }

    /// Starts the next daemon. It continues some migrations; others end, because the memory of a VM is lost with a daemon.
    fn start(&mut self) {
        self.say(|| "a daemon starts".to_owned());
        let mut book = HookBook::new(LIMIT);
        for (id, record) in &self.records {
            book.load(self.now, *id, record.clone());
        }
        let ended: BTreeSet<MigrationId> = book.migrations().collect();
        self.book = Some(book);
        self.take_actions();
        let open = self.migrations.iter().filter(|(_, known)| !known.has_ended).map(|(id, _)| *id);
        let open: BTreeSet<MigrationId> = open.collect();
        for id in open.union(&ended).copied().collect::<Vec<_>>() {
            if let Some(known) = self.migrations.get(&id)
                && let Some(book) = &mut self.book
                && !known.has_ended
            {
                book.expect(id, [known.vm.clone()].into());
            }
            let waits = self.migrations.get(&id).is_some_and(|known| !known.has_ended && known.asked_before);
            match waits && self.random.percent(GOES_ON_PERCENT) {
                true => self.tell(id, HookEvent::Wanted(Moment::Before)),
                false => self.ends(id),
            }
        }
    }

    fn tell(&mut self, id: MigrationId, event: HookEvent) {
        if let Some(book) = &mut self.book {
            book.handle_event(self.now, id, event);
        }
        self.take_actions();
    }

    fn take_actions(&mut self) {
        while let Some(action) = self.book.as_mut().and_then(HookBook::poll_action) {
            match action {
                HookAction::Prepare(id, moment) => self.tasks.push(Task::Prepare(id, moment)),
                HookAction::Record(id, number, record) => self.writes.push_back((id, number, Some(record))),
                HookAction::Release(id, moment) => self.tasks.push(Task::Release(id, moment)),
                HookAction::Find(id, moment, process) => self.tasks.push(Task::Watch(id, moment, process.id)),
                HookAction::Kill(id, moment, reason) => self.kill_process(id, moment, reason),
                HookAction::Tell(id, Moment::Before, end) => {
                    let asked = self
                        .migrations
                        .get_mut(&id)
                        .is_some_and(|known| std::mem::take(&mut known.asked_before));
                    // It moves or stays, and has ended soon.
                    if asked && (end != HookEnd::Good || self.random.percent(70)) {
                        self.ends(id);
                    }
                }
                HookAction::Tell(_, Moment::After, _) => {}
                HookAction::Forget(id) => self.writes.push_back((id, 0, None)),
            }
        }
    }

    fn kill_process(&mut self, id: MigrationId, moment: Moment, reason: KillReason) {
        let alive = |process: &Process| process.of == (id, moment) && process.is_alive;
        let mut gated = self.processes.values().filter(|process| alive(process) && !process.has_begun);
        if reason == KillReason::Overdue && gated.next().is_some() {
            self.violated(format!("{id}: {moment:?} is overdue before it has begun"));
        }
        for (number, process) in self.processes.iter_mut().filter(|(_, process)| alive(process)) {
            process.ends_at = Some(self.now);
            process.end = Some(HookEnd::Bad("killed".to_owned()));
            // A process behind its gate has not been waited for yet.
            if !process.has_begun {
                process.is_alive = false;
                self.tasks.push(Task::Watch(id, moment, *number));
            }
        }
    }

    fn do_something(&mut self) {
        let due = |task: &Task| !matches!(task, Task::Watch(..));
        let Some(at) = self.tasks.iter().position(due) else { return };
        match self.tasks.remove(at) {
            Task::Prepare(id, moment) => {
                let number = self.next;
                self.next += 1;
                let process =
                    Process { of: (id, moment), has_begun: false, ends_at: None, end: None, is_alive: true };
                self.processes.insert(number, process);
                self.tell(id, HookEvent::Prepared(moment, HookProcess { id: number, started: 1, boot: 1 }));
            }
            Task::Release(id, moment) => self.release(id, moment),
            Task::Watch(..) => {}
        }
    }

    fn release(&mut self, id: MigrationId, moment: Moment) {
        let waiting =
            |process: &Process| process.of == (id, moment) && process.is_alive && !process.has_begun;
        let Some(number) =
            self.processes.iter().find(|(_, process)| waiting(process)).map(|(number, _)| *number)
        else {
            return;
        };
        self.say(|| format!("{id}: {moment:?} begins"));
        let vm = self.migrations.get(&id).map(|known| known.vm.clone());
        let others: Vec<_> = self.processes.values().filter(|other| other.has_begun).collect();
        let has_begun = |moment| others.iter().any(|other| other.of == (id, moment));
        if has_begun(moment) {
            return self.violated(format!("{id}: {moment:?} is run twice"));
        }
        if moment == Moment::After && !has_begun(Moment::Before) {
            return self.violated(format!("{id}: {moment:?} begins, and nothing has begun before"));
        }
        let of_vm = |other: &&&Process| self.migrations.get(&other.of.0).map(|known| known.vm.clone()) == vm;
        if let Some(other) = others.iter().filter(of_vm).find(|other| other.is_alive) {
            return self.violated(format!("{id}: {moment:?} begins while {:?} of the VM runs", other.of));
        }
        let takes = Duration::from_secs(self.random.between(1, TAKES_MAX));
        if let Some(process) = self.processes.get_mut(&number) {
            process.has_begun = true;
            process.ends_at = Some(self.now + takes);
        }
        self.tasks.push(Task::Watch(id, moment, number));
        self.tell(id, HookEvent::Begun(moment));
    }

    fn end_processes(&mut self) {
        for process in self.processes.values_mut().filter(|process| process.has_begun && process.is_alive) {
            if process.ends_at.is_some_and(|at| at <= self.now) {
                process.is_alive = false;
                process.end.get_or_insert(HookEnd::Good);
            }
        }
    }

    fn watch(&mut self) {
        let has_ended = |task: &Task| match task {
            Task::Watch(_, _, number) => self.processes.get(number).is_none_or(|process| !process.is_alive),
            _ => false,
        };
        let Some(at) = self.tasks.iter().position(has_ended) else { return };
        let Task::Watch(id, moment, number) = self.tasks.remove(at) else { return };
        let event = match self.processes.get(&number) {
            Some(Process { has_begun: true, end, .. }) => {
                HookEvent::Ended(moment, end.clone().unwrap_or(HookEnd::Good))
            }
            _ => HookEvent::NeverBegan(moment),
        };
        self.tell(id, event);
    }

    fn write(&mut self) {
        let Some((id, number, record)) = self.writes.pop_front() else { return };
        let is_durable = record.is_none() || !self.random.percent(10);
        let is_record = record.is_some();
        if is_durable {
            self.durable(id, record);
        }
        if is_record {
            self.tell(id, HookEvent::Recorded { record: number, is_durable });
        }
    }

    fn durable(&mut self, id: MigrationId, record: Option<HookRecord>) {
        match record {
            Some(record) => drop(self.records.insert(id, record)),
            None => drop(self.records.remove(&id)),
        }
    }

    fn check_followed(&mut self) {
        let begun = |moment| {
            let begun =
                self.processes.values().filter(move |process| process.has_begun && process.of.1 == moment);
            begun.map(|process| process.of.0).collect::<BTreeSet<_>>()
        };
        let (before, after) = (begun(Moment::Before), begun(Moment::After));
        let left =
            before.difference(&after).find(|id| self.migrations.get(id).is_some_and(|known| known.has_ended));
        if let Some(id) = left {
            let record = self.records.get(id).map_or(HookCourse::NotBegun, |record| record.after.clone());
            self.violated(format!("{id}: nothing is run after what was run before ({record:?})"));
        }
    }

    /// Checks that finally no requester waits for the hook before a migration.
    fn check_told(&mut self) {
        let waits = |known: &Migration| known.asked_before && !known.has_ended;
        if let Some(id) = self.migrations.iter().find(|(_, known)| waits(known)).map(|(id, _)| *id) {
            self.violated(format!("{id}: nobody is told how what was run before it has ended"));
        }
    }

    fn violated(&mut self, what: String) {
        self.say(|| format!("violation: {what}"));
        self.violation.get_or_insert(what);
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.telling == Telling::Printed {
            println!("{:>6} hooks: {}", self.now.as_secs(), what());
        }
    }
}
