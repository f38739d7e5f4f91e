//! Rules of standbys broken on purpose, to prove that the simulator notices such bugs.
//!
//! Only the feature `planted-bugs` compiles the switch. A bug is chosen per thread, because a simulation runs on one thread.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident = $name:literal,)*) => {
        /// A rule that can be broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$doc])* $bug,)*
        }

        impl Bug {
            /// All rules that can be broken.
            pub const ALL: &'static [Self] = &[$(Self::$bug),*];

            /// Returns its name on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Self::$bug => $name),* }
            }
        }
    };
}

bugs! {
    /// A host that has booted serves before it has asked the standby's host.
    ServesUnasked = "standby-serves-unasked",
    /// A point stays one after an older one was begun to be put back from what was overwritten since.
    PassedPointKept = "standby-passed-point-kept",
    /// A host serves by a permission that it was given before its image was locked for long.
    OldPermission = "standby-old-permission",
    /// A host is believed to have a group that has left it for another host.
    DepartureForgotten = "standby-departure-forgotten",
    /// A host that was not named by the one before may say that it has the group.
    AnybodyArrives = "standby-anybody-arrives",
    /// A host forgets in a restart that its group was replaced.
    ReplacedForgotten = "standby-replaced-forgotten",
    /// A host whose restored standby does not agree says that it was not promoted.
    RestoredDenies = "standby-restored-denies",
    /// An owner that learns of a promotion goes on as if nothing had happened.
    DivergedQuietly = "standby-diverged-quietly",
    /// What a returned owner lacks is counted from the newest epoch that it has sent.
    ReturnSinceNewest = "standby-return-since-newest",
    /// What a former owner has written, and nobody has received, does not count as lacking when the direction is turned round.
    DivergenceForgotten = "standby-divergent-writes-forgotten",
    /// A former owner's images are overwritten before what only they have is kept.
    DivergenceOverwritten = "standby-divergence-overwritten",
    /// The images of a former owner count as older states of any promoted volume.
    ReprotectsStranger = "standby-reprotects-a-stranger",
    /// A migration gets the images of a former owner before an epoch has carried what that has written.
    FormerConsumed = "standby-former-consumed",
    /// An epoch whose seal was sent counts as received when epochs are merged.
    SentCountsAsReceived = "standby-sent-counts-as-received",
    /// Watermarks of other lives of the history are compared by number.
    LifeNotCompared = "standby-life-not-compared",
    /// Blocks that a failed flush may have lost do not count as missing.
    FailedFlushForgotten = "standby-failed-flush-forgotten",
    /// The owner forgets what the standby has before its own store was flushed.
    AcknowledgedUnflushed = "standby-acknowledged-unflushed",
    /// Overlapping writes are in flight at the same time.
    ClaimsNotTaken = "standby-claims-not-taken",
    /// An epoch is sealed while a write that belongs to it is in flight.
    WriteInFlightNotAwaited = "standby-write-in-flight-not-awaited",
    /// A mixture of two epochs is sealed.
    MixtureSealed = "standby-mixture-sealed",
    /// A spool is unlinked before the image is flushed.
    SpoolUnlinkedEarly = "standby-spool-unlinked-early",
    /// A group is sealed when the first of its spools is durable.
    VolumeSealsAlone = "standby-volume-seals-alone",
    /// A promotion does not finish applying a sealed spool.
    PromotedHalfApplied = "standby-promoted-half-applied",
    /// A promotion applies a spool that has no seal.
    UnsealedApplied = "standby-unsealed-applied",
    /// A promoted standby takes what arrives.
    PromotedReceives = "standby-promoted-receives",
    /// A promoted standby is owned before that is durable.
    OwnedBeforeDurable = "standby-owned-before-durable",
    /// A large epoch is written over the last recovery point.
    LastPointOverwritten = "standby-last-point-overwritten",
    /// The last recovery point is deleted to make room.
    LastPointPruned = "standby-last-point-pruned",
    /// The growth of a volume is not sent.
    GrowthLeftOut = "standby-growth-left-out",
    /// A discard is sent block by block.
    DiscardsByBlock = "standby-discards-by-block",
    /// A sealed spool outlives the migration that consumes its standby.
    ConsumedSpoolKept = "standby-consumed-spool-kept",
    /// Frames of a former owner are taken after those of the next one.
    FenceNotChecked = "standby-fence-not-checked",
    /// What a former owner had not confirmed counts as present at the next one.
    HandedOnAsComplete = "standby-handed-on-as-complete",
    /// An owner that lacks blocks cuts and seals.
    IncompleteCut = "standby-incomplete-cut",
    /// An image that another program has changed counts as unchanged.
    TouchedImageTrusted = "standby-touched-image-trusted",
    /// A standby of a restored journal receives at once.
    RestoredStandbyReceives = "standby-restored-receives",
    /// A promotion of an old point needs no age.
    AgeNotNamed = "standby-age-not-named",
    /// A promotion is carried out while the owner can be reached.
    PromotedBesideOwner = "standby-promoted-beside-owner",
    /// The point of a running test is deleted.
    TestedPointPruned = "standby-tested-point-pruned",
    /// A block is sent twice within its epoch.
    RewritesSent = "standby-rewrites-sent",
    /// An epoch is cut although only the disk has much of it.
    CutWhileBehind = "standby-cut-while-behind",
    /// What was sent before the cut and is written again before it is not sent again.
    EarlyNotSentAgain = "standby-early-not-sent-again",
    /// Blocks to which a write is in flight are sent before the cut.
    EarlyBesideWrite = "standby-early-beside-write",
    /// A block is read again before the cut while an older read of it has not ended.
    EarlyReadTwice = "standby-early-read-twice",
    /// A volume that grows after its epoch was announced is not announced again.
    SizesNotAnnouncedAgain = "standby-sizes-not-announced-again",
    /// A seal does not say how long ago its epoch was cut.
    SealWithoutAge = "standby-seal-without-age",
    /// An owner without writes counts its standby as current although nobody has heard that.
    CurrentUnheard = "standby-current-unheard",
    /// An interval without writes is an epoch like any other.
    IdleEpochSent = "standby-idle-epoch-sent",
}

/// Breaks a rule on this thread from now on; `None`: none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

#[cfg(feature = "planted-bugs")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

#[cfg(feature = "planted-bugs")]
pub(crate) fn broken(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

#[cfg(not(feature = "planted-bugs"))]
pub(crate) const fn broken(_: Bug) -> bool {
    false
}
