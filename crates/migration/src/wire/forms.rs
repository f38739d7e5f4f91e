//! The encoded form of messages. Within a version, variants and fields are only appended, and variants only at the end.

use std::time::Duration;

use chronicle::Generation;
use serde::{Deserialize, Serialize};

use super::attaching::{AttachmentForm, RefusedForm};
use super::opening::{
    Acceptance, AcceptedVolume, Allocation, Beside, FormerContent, Held, LeftBehind, Offer, OfferedStrategy,
    OfferedVm, OfferedVolume, Refusal, RefusalCode, Sharing,
};
use super::restoring_forms::KnownForm;
use super::survey::ProbeSeen;
use super::survey_forms::{SurveyForm, SurveyedForm};
use super::{ASKED_MAX, DETAIL_BYTES_MAX, Message, NAME_BYTES_MAX, PROBES_MAX, VOLUMES_MAX, WireError};
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{Forwarding, ImageFormat, Origin};
use crate::vm::cold;

type Generations = Vec<([u8; 16], u64)>;

#[derive(Serialize, Deserialize)]
pub(super) enum Form {
    Open {
        migration: u64,
        offer: OfferForm,
    },
    Accepted {
        migration: u64,
        volumes: Vec<AcceptedForm>,
        incarnation: u64,
    },
    Refused {
        migration: u64,
        code: CodeForm,
        detail: String,
    },
    Prepare {
        migration: u64,
        attempt: u32,
    },
    Abort {
        migration: u64,
        attempt: u32,
    },
    Commit {
        migration: u64,
        attempt: u32,
        generations: Generations,
    },
    Discard {
        migration: u64,
    },
    Prepared {
        migration: u64,
        attempt: u32,
    },
    Query {
        migration: u64,
        attempt: u32,
    },
    Active {
        migration: u64,
        attempt: u32,
        own_us: u64,
    },
    HandedBack {
        migration: u64,
        attempt: u32,
        generations: Generations,
        detail: String,
    },
    Discarded {
        migration: u64,
        left_over: String,
    },
    Unknown {
        migration: u64,
    },
    TakenByForce {
        migration: u64,
        generations: Generations,
    },
    Survey {
        question: u64,
        survey: SurveyForm,
    },
    Surveyed {
        question: u64,
        surveyed: SurveyedForm,
    },
    Probe {
        question: u64,
        store: String,
        secrets: Vec<[u8; 32]>,
    },
    Probed {
        question: u64,
        seen: Vec<ProbeSeenForm>,
    },
    Cancelled {
        migration: u64,
    },
    PrepareHollow {
        migration: u64,
        attempt: u32,
        /// Units and checksum of each volume.
        manifests: Vec<(u64, u32)>,
    },
    IsWhole {
        migration: u64,
        attempt: u32,
    },
    Whole {
        migration: u64,
        attempt: u32,
    },
    Program {
        version: String,
    },
    Whose {
        question: u64,
        volumes: Vec<[u8; 16]>,
    },
    Known {
        question: u64,
        known: Vec<KnownForm>,
        knows_all: bool,
    },
    Lacks {
        migration: u64,
        attempt: u32,
        units: u64,
    },
    NothingKept {
        migration: u64,
        attempt: u32,
    },
    GivenUp {
        migration: u64,
        attempt: u32,
    },
    CancelledAtSource {
        migration: u64,
    },
    Attach {
        question: u64,
        offered: AttachmentForm,
    },
    Detach {
        question: u64,
        volume: [u8; 16],
        is_forced: bool,
    },
    Attached {
        question: u64,
        refused: Option<RefusedForm>,
    },
    AttachmentGivenUp {
        volume: [u8; 16],
    },
}

#[derive(Serialize, Deserialize)]
pub(super) struct OfferForm {
    volumes: Vec<OfferedForm>,
    store: String,
    format: Option<FormatForm>,
    allocation: AllocationForm,
    forwarding: ForwardingForm,
    vm: Option<VmForm>,
    sharing: SharingForm,
    strategy: StrategyForm,
}

#[derive(Serialize, Deserialize)]
pub(super) struct VmForm {
    name: String,
    is_cold: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) struct OfferedForm {
    volume: [u8; 16],
    name: String,
    size_bytes: u64,
    block_size_bytes: u32,
    generation: u64,
    format: FormatForm,
    left_behind: LeftForm,
    origin: OriginForm,
}

#[derive(Serialize, Deserialize)]
pub(super) struct AcceptedForm {
    volume: [u8; 16],
    held: HeldForm,
    elsewhere: FormerForm,
    /// The name of the image's file, and the content of its token.
    beside: Option<(String, [u8; 32])>,
}

#[derive(Serialize, Deserialize)]
enum HeldForm {
    Nothing,
    Copy { departure: u64, generation: u64 },
}

/// Defines the wire's copy of an enum without fields, and the conversions.
macro_rules! twin {
    ($form:ident = $domain:ident { $($variant:ident),+ $(,)? }) => {
        #[derive(Serialize, Deserialize)]
        pub(super) enum $form { $($variant),+ }

        impl From<$domain> for $form {
            fn from(domain: $domain) -> Self {
                match domain { $($domain::$variant => Self::$variant),+ }
            }
        }

        impl From<$form> for $domain {
            fn from(form: $form) -> Self {
                match form { $($form::$variant => Self::$variant),+ }
            }
        }
    };
}

twin!(FormatForm = ImageFormat { Raw, Qcow2 });
twin!(AllocationForm = Allocation { Thin, Thick });
twin!(ForwardingForm = Forwarding { WhileConnected, Always });
twin!(FormerForm = FormerContent { Zero, Unknown });
twin!(ProbeSeenForm = ProbeSeen { Nothing, Unlocked, Locked });
twin!(SharingForm = Sharing { Wanted, Refused });
twin!(OriginForm = Origin { Unknown, Made, Given });
twin!(StrategyForm = OfferedStrategy { Mirror, Tracking, PostCopy });
twin!(LeftForm = LeftBehind { Nothing, Replica });
twin!(
    CodeForm = RefusalCode {
        UnknownStore,
        NoSpace,
        NameTaken,
        VolumePresent,
        Unsuitable,
        Busy,
        NotAllowed,
        Over,
        Failed,
    }
);

impl Form {
    pub(super) fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Open { offer, .. } => offer.check(),
            Self::Accepted { volumes, .. } => {
                at_most(volumes.len(), VOLUMES_MAX, "volumes")?;
                volumes.iter().try_for_each(|volume| {
                    let name = volume.beside.as_ref().map_or("", |(name, _)| name);
                    at_most(name.len(), NAME_BYTES_MAX, "bytes of a name")
                })
            }
            Self::Refused { detail, .. } => {
                at_most(detail.len(), DETAIL_BYTES_MAX, "bytes of an explanation")
            }
            Self::HandedBack { generations, detail, .. } => {
                at_most(generations.len(), VOLUMES_MAX, "volumes")?;
                at_most(detail.len(), DETAIL_BYTES_MAX, "bytes of an explanation")
            }
            Self::PrepareHollow { manifests, .. } => at_most(manifests.len(), VOLUMES_MAX, "volumes"),
            Self::Commit { generations, .. } | Self::TakenByForce { generations, .. } => {
                at_most(generations.len(), VOLUMES_MAX, "volumes")
            }
            Self::Survey { survey, .. } => {
                survey.offer.check()?;
                survey.check()
            }
            Self::Surveyed { surveyed, .. } => surveyed.check(),
            Self::Probe { store, secrets, .. } => {
                at_most(store.len(), NAME_BYTES_MAX, "bytes of a name")?;
                at_most(secrets.len(), PROBES_MAX, "probes")
            }
            Self::Probed { seen, .. } => at_most(seen.len(), PROBES_MAX, "probes"),
            Self::Program { version } => at_most(version.len(), NAME_BYTES_MAX, "bytes of a name"),
            Self::Whose { volumes, .. } => at_most(volumes.len(), ASKED_MAX, "volumes"),
            Self::Known { known, .. } => at_most(known.len(), ASKED_MAX, "volumes"),
            Self::Discarded { left_over, .. } => {
                at_most(left_over.len(), DETAIL_BYTES_MAX, "bytes of an explanation")
            }
            Self::Attach { offered, .. } => offered.check(),
            Self::Attached { refused, .. } => refused.iter().try_for_each(RefusedForm::check),
            _ => Ok(()),
        }
    }
}

impl OfferForm {
    pub(super) fn volume_count(&self) -> usize {
        self.volumes.len()
    }

    fn check(&self) -> Result<(), WireError> {
        at_most(self.volumes.len(), VOLUMES_MAX, "volumes")?;
        at_most(self.store.len(), NAME_BYTES_MAX, "bytes of a name")?;
        self.volumes.iter().try_for_each(|volume| {
            at_most(volume.name.len(), NAME_BYTES_MAX, "bytes of a name")?;
            // A block size is a power of two, and a volume is not empty.
            let fits = volume.block_size_bytes.is_power_of_two() && volume.size_bytes > 0;
            if fits { Ok(()) } else { Err(WireError::Malformed) }
        })?;
        self.vm.iter().try_for_each(|vm| at_most(vm.name.len(), NAME_BYTES_MAX, "bytes of a name"))
    }
}

impl From<Message> for Form {
    fn from(message: Message) -> Self {
        match message {
            Message::Open { migration, offer } => Self::Open { migration: migration.0, offer: offer.into() },
            Message::Accepted { migration, acceptance } => Self::Accepted {
                migration: migration.0,
                volumes: acceptance.volumes.into_iter().map(Into::into).collect(),
                incarnation: acceptance.incarnation,
            },
            Message::Refused { migration, refusal } => Self::Refused {
                migration: migration.0,
                code: refusal.code.into(),
                detail: cut(refusal.detail),
            },
            Message::Survey { question, survey } => Self::Survey { question, survey: survey.into() },
            Message::Surveyed { question, surveyed } => {
                Self::Surveyed { question, surveyed: surveyed.into() }
            }
            Message::Program { version } => Self::Program { version },
            Message::Whose { question, volumes } => {
                Self::Whose { question, volumes: volumes.into_iter().map(|volume| volume.0).collect() }
            }
            Message::Known { question, known, knows_all } => {
                Self::Known { question, known: known.into_iter().map(KnownForm::from).collect(), knows_all }
            }
            Message::Attach { question, offered } => Self::Attach { question, offered: offered.into() },
            Message::Detach { question, volume, is_forced } => {
                Self::Detach { question, volume: volume.0, is_forced }
            }
            Message::Attached { question, refused } => {
                Self::Attached { question, refused: refused.map(Into::into) }
            }
            Message::AttachmentGivenUp { volume } => Self::AttachmentGivenUp { volume: volume.0 },
            Message::Probe { question, store, secrets } => Self::Probe { question, store, secrets },
            Message::Probed { question, seen } => {
                Self::Probed { question, seen: seen.into_iter().map(ProbeSeenForm::from).collect() }
            }
            Message::ToTarget { migration: MigrationId(migration), message } => match message {
                ToTarget::Prepare(Attempt(attempt)) => Self::Prepare { migration, attempt },
                ToTarget::Abort(Attempt(attempt)) => Self::Abort { migration, attempt },
                ToTarget::Commit { attempt: Attempt(attempt), generations } => {
                    Self::Commit { migration, attempt, generations: plain(generations) }
                }
                ToTarget::Discard => Self::Discard { migration },
                ToTarget::PrepareHollow { attempt: Attempt(attempt), manifests } => {
                    let plain = |manifest: Manifest| (manifest.units, manifest.checksum);
                    let manifests = manifests.into_iter().map(plain).collect();
                    Self::PrepareHollow { migration, attempt, manifests }
                }
                ToTarget::IsWhole(Attempt(attempt)) => Self::IsWhole { migration, attempt },
                ToTarget::NothingKept(Attempt(attempt)) => Self::NothingKept { migration, attempt },
                ToTarget::Cancelled => Self::CancelledAtSource { migration },
            },
            Message::ToSource { migration: MigrationId(migration), message } => match message {
                ToSource::Prepared(Attempt(attempt)) => Self::Prepared { migration, attempt },
                ToSource::Query(Attempt(attempt)) => Self::Query { migration, attempt },
                ToSource::Active { attempt: Attempt(attempt), own } => {
                    let own_us = u64::try_from(own.as_micros()).unwrap_or(u64::MAX);
                    Self::Active { migration, attempt, own_us }
                }
                ToSource::HandedBack { attempt: Attempt(attempt), generations, detail } => {
                    let (generations, detail) = (plain(generations), cut(detail));
                    Self::HandedBack { migration, attempt, generations, detail }
                }
                ToSource::Discarded { left_over } => Self::Discarded { migration, left_over: cut(left_over) },
                ToSource::Unknown => Self::Unknown { migration },
                ToSource::Cancelled => Self::Cancelled { migration },
                ToSource::TakenByForce { generations } => {
                    Self::TakenByForce { migration, generations: plain(generations) }
                }
                ToSource::Whole(Attempt(attempt)) => Self::Whole { migration, attempt },
                ToSource::Lacks { attempt: Attempt(attempt), units } => {
                    Self::Lacks { migration, attempt, units }
                }
                ToSource::GivenUp(Attempt(attempt)) => Self::GivenUp { migration, attempt },
            },
        }
    }
}

impl From<Form> for Message {
    fn from(form: Form) -> Self {
        let to_target = |migration, message| Self::ToTarget { migration: MigrationId(migration), message };
        let to_source = |migration, message| Self::ToSource { migration: MigrationId(migration), message };
        match form {
            Form::Open { migration, offer } => {
                Self::Open { migration: MigrationId(migration), offer: offer.into() }
            }
            Form::Accepted { migration, volumes, incarnation } => {
                let volumes = volumes.into_iter().map(Into::into).collect();
                let acceptance = Acceptance { volumes, incarnation };
                Self::Accepted { migration: MigrationId(migration), acceptance }
            }
            Form::Refused { migration, code, detail } => {
                let refusal = Refusal { code: code.into(), detail: words::clean(&detail) };
                Self::Refused { migration: MigrationId(migration), refusal }
            }
            Form::Survey { question, survey } => Self::Survey { question, survey: survey.into() },
            Form::Surveyed { question, surveyed } => Self::Surveyed { question, surveyed: surveyed.into() },
            Form::Program { version } => Self::Program { version: words::clean(&version) },
            Form::Whose { question, volumes } => {
                Self::Whose { question, volumes: volumes.into_iter().map(VolumeId).collect() }
            }
            Form::Known { question, known, knows_all } => {
                Self::Known { question, known: known.into_iter().map(Into::into).collect(), knows_all }
            }
            Form::Attach { question, offered } => Self::Attach { question, offered: offered.into() },
            Form::Detach { question, volume, is_forced } => {
                Self::Detach { question, volume: VolumeId(volume), is_forced }
            }
            Form::Attached { question, refused } => {
                Self::Attached { question, refused: refused.map(Into::into) }
            }
            Form::AttachmentGivenUp { volume } => Self::AttachmentGivenUp { volume: VolumeId(volume) },
            Form::Probe { question, store, secrets } => Self::Probe { question, store, secrets },
            Form::Probed { question, seen } => {
                Self::Probed { question, seen: seen.into_iter().map(ProbeSeen::from).collect() }
            }
            Form::Prepare { migration, attempt } => to_target(migration, ToTarget::Prepare(Attempt(attempt))),
            Form::Abort { migration, attempt } => to_target(migration, ToTarget::Abort(Attempt(attempt))),
            Form::Commit { migration, attempt, generations } => {
                let (attempt, generations) = (Attempt(attempt), named(generations));
                to_target(migration, ToTarget::Commit { attempt, generations })
            }
            Form::Discard { migration } => to_target(migration, ToTarget::Discard),
            Form::PrepareHollow { migration, attempt, manifests } => {
                let named = |(units, checksum)| Manifest { units, checksum };
                let (attempt, manifests) = (Attempt(attempt), manifests.into_iter().map(named).collect());
                to_target(migration, ToTarget::PrepareHollow { attempt, manifests })
            }
            Form::IsWhole { migration, attempt } => to_target(migration, ToTarget::IsWhole(Attempt(attempt))),
            Form::NothingKept { migration, attempt } => {
                to_target(migration, ToTarget::NothingKept(Attempt(attempt)))
            }
            Form::CancelledAtSource { migration } => to_target(migration, ToTarget::Cancelled),
            Form::Whole { migration, attempt } => to_source(migration, ToSource::Whole(Attempt(attempt))),
            Form::Lacks { migration, attempt, units } => {
                to_source(migration, ToSource::Lacks { attempt: Attempt(attempt), units })
            }
            Form::GivenUp { migration, attempt } => to_source(migration, ToSource::GivenUp(Attempt(attempt))),
            Form::Prepared { migration, attempt } => {
                to_source(migration, ToSource::Prepared(Attempt(attempt)))
            }
            Form::Query { migration, attempt } => to_source(migration, ToSource::Query(Attempt(attempt))),
            Form::Active { migration, attempt, own_us } => {
                let (attempt, own) = (Attempt(attempt), Duration::from_micros(own_us));
                to_source(migration, ToSource::Active { attempt, own })
            }
            Form::HandedBack { migration, attempt, generations, detail } => {
                let (attempt, generations) = (Attempt(attempt), named(generations));
                let detail = words::clean(&detail);
                to_source(migration, ToSource::HandedBack { attempt, generations, detail })
            }
            Form::Discarded { migration, left_over } => {
                to_source(migration, ToSource::Discarded { left_over: words::clean(&left_over) })
            }
            Form::Unknown { migration } => to_source(migration, ToSource::Unknown),
            Form::Cancelled { migration } => to_source(migration, ToSource::Cancelled),
            Form::TakenByForce { migration, generations } => {
                to_source(migration, ToSource::TakenByForce { generations: named(generations) })
            }
        }
    }
}

impl From<Offer> for OfferForm {
    fn from(offer: Offer) -> Self {
        let volume = |volume: OfferedVolume| OfferedForm {
            volume: volume.volume.0,
            name: volume.name,
            size_bytes: volume.size_bytes,
            block_size_bytes: volume.block_size_bytes,
            generation: volume.generation.0,
            format: volume.format.into(),
            left_behind: volume.left_behind.into(),
            origin: volume.origin.into(),
        };
        Self {
            volumes: offer.volumes.into_iter().map(volume).collect(),
            store: offer.store,
            format: offer.format.map(Into::into),
            allocation: offer.allocation.into(),
            forwarding: offer.forwarding.into(),
            vm: offer.vm.map(|vm| VmForm { name: vm.name, is_cold: vm.form == cold::Form::Cold }),
            sharing: offer.sharing.into(),
            strategy: offer.strategy.into(),
        }
    }
}

impl From<OfferForm> for Offer {
    fn from(form: OfferForm) -> Self {
        let volume = |form: OfferedForm| OfferedVolume {
            volume: VolumeId(form.volume),
            name: form.name,
            size_bytes: form.size_bytes,
            block_size_bytes: form.block_size_bytes,
            generation: Generation(form.generation),
            format: form.format.into(),
            left_behind: form.left_behind.into(),
            origin: form.origin.into(),
        };
        Self {
            volumes: form.volumes.into_iter().map(volume).collect(),
            store: form.store,
            format: form.format.map(Into::into),
            allocation: form.allocation.into(),
            forwarding: form.forwarding.into(),
            vm: form.vm.map(|VmForm { name, is_cold }| OfferedVm {
                name,
                form: if is_cold { cold::Form::Cold } else { cold::Form::Live },
            }),
            sharing: form.sharing.into(),
            strategy: form.strategy.into(),
        }
    }
}

impl From<AcceptedVolume> for AcceptedForm {
    fn from(accepted: AcceptedVolume) -> Self {
        let held = match accepted.held {
            Held::Nothing => HeldForm::Nothing,
            Held::Copy { departure, generation } => {
                HeldForm::Copy { departure: departure.0, generation: generation.0 }
            }
        };
        let beside = accepted.beside.map(|Beside { file, token }| (file, token));
        Self { volume: accepted.volume.0, held, elsewhere: accepted.elsewhere.into(), beside }
    }
}

impl From<AcceptedForm> for AcceptedVolume {
    fn from(form: AcceptedForm) -> Self {
        let held = match form.held {
            HeldForm::Nothing => Held::Nothing,
            HeldForm::Copy { departure, generation } => {
                Held::Copy { departure: MigrationId(departure), generation: Generation(generation) }
            }
        };
        let beside = form.beside.map(|(file, token)| Beside { file, token });
        Self { volume: VolumeId(form.volume), held, elsewhere: form.elsewhere.into(), beside }
    }
}

pub(super) fn at_most(count: usize, count_max: usize, what: &'static str) -> Result<(), WireError> {
    if count <= count_max { Ok(()) } else { Err(WireError::TooMany { what }) }
}

fn plain(generations: Vec<(VolumeId, Generation)>) -> Generations {
    generations.into_iter().map(|(volume, generation)| (volume.0, generation.0)).collect()
}

fn named(generations: Generations) -> Vec<(VolumeId, Generation)> {
    generations.into_iter().map(|(volume, generation)| (VolumeId(volume), Generation(generation))).collect()
}

/// Cuts a text at the length limit, between two characters.
pub(super) fn cut(mut text: String) -> String {
    let mut end = text.len().min(DETAIL_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}
