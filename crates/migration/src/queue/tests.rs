//! Tests turns: which orders may begin, in which order, and that none waits for ever.

use proptest::prelude::*;

use super::*;
use crate::journal::ImageLocation;

const LIMITS: QueueLimits = QueueLimits { per_host: 3, per_store: 2 };
const WAITING_MAX: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Ordered {
    volumes: [VolumeId; 1],
    need: Need,
    copied_to: Option<HostId>,
    not_before: Option<u64>,
}

impl Wish for Ordered {
    fn volumes(&self) -> &[VolumeId] {
        &self.volumes
    }

    fn need(&self) -> &Need {
        &self.need
    }

    fn is_copied_to(&self) -> Option<HostId> {
        self.copied_to
    }

    fn not_before_unix_ms(&self) -> Option<u64> {
        self.not_before
    }
}

/// These operations, at the time 0.
fn beside(under_way: Vec<UnderWay>) -> Present {
    Present { under_way, now_unix_ms: 0 }
}

fn need(stores: &str) -> Need {
    Need { stores: stores.chars().map(String::from).collect() }
}

fn needs(stores: &[&str]) -> Vec<Need> {
    stores.iter().map(|stores| need(stores)).collect()
}

fn wish(volume: u8, stores: &str) -> Ordered {
    Ordered { volumes: [VolumeId([volume; 16])], need: need(stores), copied_to: None, not_before: None }
}

fn judged(limits: QueueLimits, under_way: &[&str], waiting: &[&str]) -> String {
    // A star marks a volume that lacks blocks.
    let claimant = |stores: &&str| Claimant {
        need: need(stores.trim_end_matches('*')),
        own_obstacle: stores.ends_with('*').then(|| Obstacle::Filling { from: "filling".to_owned() }),
    };
    let waiting: Vec<Claimant> = waiting.iter().map(claimant).collect();
    let judged = judge(limits, &needs(under_way), &waiting);
    let word = |obstacle: Option<Obstacle>| match obstacle {
        None => "go".to_owned(),
        Some(Obstacle::Host { .. }) => "host".to_owned(),
        Some(Obstacle::Store { store, .. }) => store,
        Some(Obstacle::Filling { from }) => from,
        Some(Obstacle::Time { unix_ms }) => format!("at {unix_ms}"),
    };
    judged.into_iter().map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_has_room_begins_in_order_and_what_waits_names_what_is_full() {
    assert_eq!(judged(LIMITS, &[], &["ab", "cd", "ef", "gh"]), "go go go host");
    assert_eq!(judged(LIMITS, &["ab"], &["ac", "ad", "ef"]), "go a go");
    assert_eq!(judged(LIMITS, &["ab", "ab", "cd"], &["ef"]), "host");
    assert_eq!(judged(LIMITS, &["", ""], &["", ""]), "go host");
}

#[test]
fn nobody_overtakes_into_a_store_that_somebody_waits_for() {
    // The first waits for a and b. The second would take the last place in b.
    let limits = QueueLimits { per_host: 9, ..LIMITS };
    assert_eq!(judged(limits, &["a", "a"], &["ab", "b", "b"]), "a go b");
    // A migration that needs neither store proceeds.
    assert_eq!(judged(limits, &["a", "a"], &["ab", "ab", "cd"]), "a a go");
}

#[test]
fn what_lacks_blocks_waits_and_holds_nobody_up() {
    let limits = QueueLimits { per_host: 2, per_store: 1 };
    assert_eq!(judged(limits, &[], &["ab*", "ab", "cd"]), "filling go go");
    assert_eq!(judged(limits, &["a"], &["ab*", "ab", "cd"]), "filling a go");

    let mut queue = Queue::new(LIMITS, WAITING_MAX);
    let filling =
        || ["one", "two"].into_iter().zip(1..).map(|(from, volume)| filling(volume, from, &[volume]));
    let Turn::Later(place) = queue.ask(&wish(2, "a"), &beside(filling().collect())) else {
        panic!("it lacks blocks")
    };
    assert_eq!(place.obstacle, Some(Obstacle::Filling { from: "two".to_owned() }));
    assert!(queue.join(MigrationId(7), wish(2, "a")));
    assert!(queue.next(&beside(filling().collect())).is_empty());
    assert!(matches!(queue.ask(&wish(3, "a"), &beside(filling().collect())), Turn::Now(_)));
    assert_eq!(queue.next(&beside(filling().take(1).collect())).len(), 1, "it has all come");
}

#[test]
fn what_lacks_blocks_goes_back_to_where_they_are_all_together() {
    let back = |copied_to| Ordered { copied_to, ..wish(1, "a") };
    let asked = |wish: &Ordered, together: &[u8]| {
        let mut queue = Queue::new(LIMITS, WAITING_MAX);
        matches!(queue.ask(wish, &beside(vec![filling(1, "one", together)])), Turn::Now(_))
    };
    assert!(asked(&back(Some(HostId([1; 32]))), &[1]));
    assert!(!asked(&back(Some(HostId([2; 32]))), &[1]), "another host has nothing of what is missing");
    assert!(!asked(&back(None), &[1]), "what it lacks would be missing at both");
    assert!(!asked(&back(Some(HostId([1; 32]))), &[1, 2]), "one of two would stay");
}

#[test]
fn what_other_hosts_bring_takes_no_place_of_what_is_ordered_here() {
    let brought = |peer: u8| UnderWay::Migration {
        of: Party::Peer(HostId([peer; 32])),
        volumes: vec![VolumeId([200 + peer; 16])],
        need: need("a"),
    };
    let mut queue = Queue::new(LIMITS, WAITING_MAX);
    let under_way = || (0..50).map(brought).collect::<Vec<_>>();
    assert!(matches!(queue.ask(&wish(1, "a"), &beside(under_way())), Turn::Now(_)));
    assert!(matches!(queue.ask(&wish(2, "a"), &beside(under_way())), Turn::Now(_)));
    assert!(!queue.has_used_up_the_host(&beside(under_way())));
    let Turn::Later(place) = queue.ask(&wish(3, "a"), &beside(under_way())) else {
        panic!("its own orders count")
    };
    assert_eq!(place.obstacle, Some(Obstacle::Store { store: "a".to_owned(), limit: 2 }));
}

/// Returns the filling of a volume that came from host number 1.
fn filling(volume: u8, from: &str, together: &[u8]) -> UnderWay {
    UnderWay::Filling {
        volume: VolumeId([volume; 16]),
        peer: HostId([1; 32]),
        from: from.to_owned(),
        together: together.iter().map(|volume| VolumeId([*volume; 16])).collect(),
    }
}

#[test]
fn an_image_that_is_served_in_place_is_in_no_store() {
    let source = ImageLocation::raw_file("", "/srv/own.img");
    let moving = |source: ImageLocation| MigratingVolume {
        volume: VolumeId([1; 16]),
        source,
        target: ImageLocation::raw_file("b", "/b/v.img"),
    };
    assert_eq!(Need::of(&[moving(source)]), need("b"));
    assert_eq!(Need::of(&[moving(ImageLocation::raw_file("a", "/a/v.img"))]), need("ab"));
}

#[test]
fn as_many_wait_as_may_and_what_waits_is_found_by_its_volume() {
    let mut queue = Queue::new(QueueLimits { per_host: 1, per_store: 1 }, 2);
    let Turn::Now(admission) = queue.ask(&wish(1, "ab"), &beside(Vec::new())) else {
        panic!("there is room")
    };
    for (id, volume) in [(4, 2), (7, 3)] {
        assert!(matches!(queue.ask(&wish(volume, "ab"), &beside(Vec::new())), Turn::Later(_)));
        assert!(queue.join(MigrationId(id), wish(volume, "ab")));
    }
    assert!(queue.is_full() && !queue.join(MigrationId(8), wish(4, "ab")));
    assert_eq!((queue.of(VolumeId([3; 16])), queue.next_free()), (Some(MigrationId(7)), 8));
    assert_eq!(queue.outlook(&wish(2, "cd"), &beside(Vec::new())), Turn::Waits(MigrationId(4)));
    let place = queue.place(MigrationId(7), &beside(Vec::new())).unwrap();
    assert_eq!((place.place, place.waiting, place.obstacle), (2, 2, Some(Obstacle::Host { limit: 1 })));
    queue.give_back(admission);
    queue.give_back(admission);
    assert_eq!(queue.next(&beside(Vec::new())).len(), 1);
    assert_eq!(queue.place(MigrationId(4), &beside(Vec::new())), None, "its turn has come");
}

#[derive(Clone, Debug)]
enum Operation {
    Order(u8, String),
    Turn,
    /// An admitted order becomes known as under way, and gives its right back.
    Known(prop::sample::Index),
    Again(prop::sample::Index),
    End(prop::sample::Index),
    Withdraw(prop::sample::Index),
}

fn operation() -> impl Strategy<Value = Operation> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (0..12_u8, "[a-d]{1,2}").prop_map(|(volume, stores)| Operation::Order(volume, stores)),
        4 => Just(Operation::Turn),
        3 => index().prop_map(Operation::Known),
        1 => index().prop_map(Operation::Again),
        3 => index().prop_map(Operation::End),
        1 => index().prop_map(Operation::Withdraw),
    ]
}

struct Host {
    queue: Queue<Ordered>,
    next: u64,
    /// Orders that have begun and have not given their right back yet; those of the queue have a number.
    beginning: Vec<(Option<MigrationId>, Ordered, Admission)>,
    running: Vec<(Vec<VolumeId>, Need)>,
}

impl Host {
    fn new() -> Self {
        let queue = Queue::new(LIMITS, WAITING_MAX);
        Self { queue, next: 1, beginning: Vec::new(), running: Vec::new() }
    }

    fn under_way(&self) -> Vec<UnderWay> {
        let running = self.running.iter().cloned();
        running.map(|(volumes, need)| UnderWay::Migration { of: Party::Own, volumes, need }).collect()
    }

    fn is_busy(&self, volume: VolumeId) -> bool {
        self.running.iter().any(|(volumes, _)| volumes.contains(&volume))
            || self.beginning.iter().any(|(_, other, _)| other.volumes.contains(&volume))
    }

    fn carry_out(&mut self, operation: &Operation) {
        match operation {
            Operation::Order(volume, stores) => {
                let wish = wish(*volume, stores);
                // The caller ensures that a volume has only one migration.
                if self.is_busy(wish.volumes[0]) {
                    return;
                }
                match self.queue.ask(&wish, &beside(self.under_way())) {
                    Turn::Now(admission) => self.beginning.push((None, wish, admission)),
                    Turn::Later(_) => {
                        assert!(self.queue.join(MigrationId(self.next), wish));
                        self.next += 1;
                    }
                    Turn::Waits(id) => assert!(self.queue.get(id).is_some()),
                }
            }
            Operation::Turn => {
                let begun = self.queue.next(&beside(self.under_way())).into_iter();
                self.beginning.extend(begun.map(|(id, wish, admission)| (Some(id), wish, admission)));
            }
            Operation::Known(index) if !self.beginning.is_empty() => {
                let (id, wish, admission) = self.beginning.remove(index.index(self.beginning.len()));
                self.running.push((wish.volumes.to_vec(), wish.need));
                // The order is in both states for a moment.
                self.check();
                id.into_iter().for_each(|id| self.queue.leave(id));
                self.queue.give_back(admission);
            }
            Operation::Again(index) if !self.beginning.is_empty() => {
                let (id, _, admission) = self.beginning.remove(index.index(self.beginning.len()));
                id.into_iter().for_each(|id| self.queue.wait_again(id));
                self.queue.give_back(admission);
            }
            Operation::End(index) if !self.running.is_empty() => {
                self.running.remove(index.index(self.running.len()));
            }
            Operation::Withdraw(index) => {
                let ids: Vec<_> = self.queue.ids().collect();
                let Some(id) = (!ids.is_empty()).then(|| ids[index.index(ids.len())]) else { return };
                let begins = self.beginning.iter().any(|(number, ..)| *number == Some(id));
                assert_eq!(matches!(self.queue.withdraw(id), Withdrawal::Begins(_)), begins);
            }
            Operation::Known(_) | Operation::Again(_) | Operation::End(_) => {}
        }
    }

    fn check(&self) {
        let beginning = self.beginning.iter().map(|(_, wish, _)| &wish.need);
        let needs: Vec<&Need> = self.running.iter().map(|(_, need)| need).chain(beginning).collect();
        assert!(needs.len() <= LIMITS.per_host as usize, "{needs:?}");
        for store in ["a", "b", "c", "d"] {
            let users = needs.iter().filter(|need| need.stores.contains(store)).count();
            assert!(users <= LIMITS.per_store as usize, "{store}: {needs:?}");
        }
    }

    fn drain(&mut self) {
        for _ in 0..=WAITING_MAX {
            self.beginning.drain(..).for_each(|(id, _, admission)| {
                id.into_iter().for_each(|id| self.queue.leave(id));
                self.queue.give_back(admission);
            });
            self.running.clear();
            if self.queue.ids().next().is_none() {
                return;
            }
            self.carry_out(&Operation::Turn);
            self.check();
            assert!(!self.beginning.is_empty(), "somebody always has a turn");
        }
        panic!("somebody waits for ever");
    }
}

proptest! {
    /// Random orders, starts, returns, ends and withdrawals: no limit is exceeded, and nothing waits for ever.
    #[test]
    fn limits_hold_whatever_is_done_and_everybody_gets_a_turn(
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut host = Host::new();
        for operation in &operations {
            host.carry_out(operation);
            host.check();
        }
        host.drain();
    }

    /// Random orders for random stores: no limit is exceeded, and each begins before later ones for the same stores.
    #[test]
    fn limits_hold_and_everybody_gets_a_turn(
        orders in prop::collection::vec("[a-d]{1,2}", 1..20),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 20),
    ) {
        let mut waiting: Vec<(usize, Need)> = orders.iter().map(|stores| need(stores)).enumerate().collect();
        let mut running: Vec<(usize, Need)> = Vec::new();
        let mut begun = Vec::new();
        for end in ends {
            let used: Vec<Need> = running.iter().map(|(_, need)| need.clone()).collect();
            let line = waiting.iter().map(|(_, need)| Claimant { need: need.clone(), own_obstacle: None });
            let line: Vec<Claimant> = line.collect();
            let verdicts = judge(LIMITS, &used, &line);
            let mut verdicts = verdicts.iter();
            waiting.retain(|one| {
                let goes = verdicts.next().is_some_and(Option::is_none);
                if goes {
                    running.push(one.clone());
                    begun.push(one.clone());
                }
                !goes
            });
            prop_assert!(running.len() <= 3);
            for store in ["a", "b", "c", "d"] {
                prop_assert!(running.iter().filter(|(_, need)| need.stores.contains(store)).count() <= 2);
            }
            prop_assert!(!running.is_empty() || waiting.is_empty(), "somebody always has a turn");
            if !running.is_empty() {
                running.remove(end.index(running.len()));
            }
        }
        prop_assert!(waiting.is_empty(), "each end lets at least one begin");
        for (at, (number, need)) in begun.iter().enumerate() {
            let overtaken = begun[at..].iter().any(|(later, other)| later < number && other.stores == need.stores);
            prop_assert!(!overtaken, "{begun:?}");
        }
    }
}

#[test]
fn a_migration_ordered_for_a_time_waits_for_it_and_holds_nobody_up() {
    let at = |not_before, volume| Ordered { not_before: Some(not_before), ..wish(volume, "a") };
    let mut queue = Queue::new(QueueLimits { per_host: 1, per_store: 1 }, WAITING_MAX);
    let Turn::Later(place) = queue.ask(&at(50, 1), &beside(Vec::new())) else { panic!("its time is later") };
    assert_eq!(place.obstacle, Some(Obstacle::Time { unix_ms: 50 }));
    assert!(queue.join(MigrationId(1), at(50, 1)));
    assert!(queue.join(MigrationId(2), at(90, 2)));
    let Turn::Now(other) = queue.ask(&wish(3, "a"), &beside(Vec::new())) else {
        panic!("nothing is under way")
    };
    queue.give_back(other);

    assert_eq!(queue.next_time(0), Some(50));
    let present = |now_unix_ms| Present { under_way: Vec::new(), now_unix_ms };
    assert!(queue.next(&present(49)).is_empty());
    let begun = queue.next(&present(50));
    assert_eq!(begun.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [MigrationId(1)]);
    assert_eq!(queue.next_time(50), Some(90));
    // The clock was set back: what has begun goes on, and the rest waits for the same time.
    assert!(queue.next(&present(10)).is_empty());
    assert_eq!(queue.next_time(10), Some(90));
}
