//! Standbys: copies of volumes at other hosts that are seconds old.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An order to keep a standby of volumes that are served here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewStandby {
    /// The volumes, by name, or one VM: its volumes. All are cut at the same moments.
    pub volumes: Vec<String>,
    /// The host that keeps the standby.
    pub host: String,
    /// The store at that host; by default that host chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// Seconds between two cuts; 10 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<f64>,
    /// The age in seconds beyond which the standby is behind; six intervals by default, and a minute at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo_seconds: Option<f64>,
    /// The most bytes a second that it sends; by default there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Which recovery points are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<KeepPoints>,
    /// What a start does if that host says nothing; by default what the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_silent: Option<IfSilent>,
}

/// What a host does with its volumes after a start if the host of their standby does not say whether that was promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IfSilent {
    /// They wait until it says so, or an administrator orders to serve them.
    Wait,
    /// They are served after a while.
    Serve,
}

/// Which recovery points are kept beside the standby's images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepPoints {
    /// The newest points.
    #[serde(default)]
    pub last: u32,
    /// The newest point of each of the last hours that have one.
    #[serde(default)]
    pub hourly: u32,
    /// The newest point of each of the last days that have one.
    #[serde(default)]
    pub daily: u32,
}

impl KeepPoints {
    /// What is kept by default.
    pub const DEFAULT: Self = Self { last: 6, hourly: 24, daily: 7 };
    /// None.
    pub const NONE: Self = Self { last: 0, hourly: 0, daily: 0 };
}

/// A change of a standby at its source. Only the given fields change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetStandby {
    /// Seconds between two cuts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<f64>,
    /// The age in seconds beyond which the standby is behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo_seconds: Option<f64>,
    /// The most bytes a second that it sends; zero: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Whether it is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// What a start does if the other host says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_silent: Option<IfSilent>,
}

/// How a standby is removed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, utoipa::IntoParams,
)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct RemoveStandby {
    /// Also if the other host does not answer. Its part then has to be removed there.
    #[serde(default)]
    pub force: bool,
}

/// An order to promote a standby that is kept here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteStandby {
    /// Name of the host that had the volumes, and is off: it does not serve them, and will not. While it is not certain at which of two hosts
    /// they are, the names of both, with a comma between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_is_off: Option<String>,
    /// The age in seconds that is accepted; by default an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub older_than_ok_seconds: Option<f64>,
    /// The recovery point; by default the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<String>,
    /// Leave its VMs stopped.
    #[serde(default)]
    pub leave_stopped: bool,
    /// Other names that its volumes get here, by their own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
}

/// An order to turn the direction of a promoted standby round: the host that had the volumes before keeps a standby of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReprotectStandby {
    /// Seconds between two cuts; 10 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<f64>,
    /// The age in seconds beyond which the standby is behind; six intervals by default, and a minute at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo_seconds: Option<f64>,
    /// The most bytes a second that it sends; by default there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Which recovery points are kept; by default those of the standby that was promoted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<KeepPoints>,
    /// What a start does if the other host says nothing; by default what the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_silent: Option<IfSilent>,
}

/// An order to begin a standby that is kept here with images, so that only the difference is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SeedStandby {
    /// The images. A volume without one is sent as a whole.
    #[serde(default)]
    pub images: Vec<SeedImage>,
    /// Instead of images: the name of an exported folder in the folder of the standby's store. Only what was written since is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exported: Option<String>,
}

/// An order to export a standby that has nothing yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportStandby {
    /// The absolute path of a folder of the daemon's host that is not there yet. Its parent is.
    pub folder: String,
}

/// An image for a volume of a standby.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SeedImage {
    /// The volume; by default the only one of the standby.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The name of a raw image in the folder of the standby's store. It becomes the standby's.
    pub file: String,
}

/// An order to test a standby that is kept here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TestStandby {
    /// The recovery point; by default the newest state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<String>,
    /// The name of the test; by default that of the standby with `-test` at its end. One volume alone has this name; several have it
    /// before their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seconds after which it ends; an hour by default. With a `boot_check`, it ends with that unless this is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_seconds: Option<f64>,
    /// The networks of its VMs.
    #[serde(default)]
    pub networks: TestNetworks,
    /// Wait for this text on a serial console of its VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_check: Option<String>,
    /// Seconds that this may take from the start of the VMs; 120 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_check_timeout_seconds: Option<f64>,
}

/// The networks of the VMs of a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TestNetworks {
    /// They lead nowhere.
    #[default]
    None,
    /// They are those of the VM. The guest has the addresses of the original.
    Keep,
}

/// How the volumes of a promoted standby are given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct YieldVolume {
    /// Also while clients are connected; they are disconnected.
    #[serde(default)]
    pub force: bool,
    /// At the first host: also if the host that has promoted the standby has not agreed. It may have given the volumes up, too.
    #[serde(default)]
    pub unasked: bool,
}

/// The part of this host in a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StandbyRole {
    /// The volumes are served here.
    Source,
    /// The copy is kept here.
    Standby,
}

/// The state of a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StandbyState {
    /// It has never had everything.
    Seeding,
    /// It is younger than its `rpo`.
    Current,
    /// It is older than its `rpo`.
    Behind,
    /// An administrator has paused it.
    Paused,
    /// It has no recovery point.
    NoRecoveryPoint,
    /// It was promoted: its volumes are served at the standby's host.
    Promoted,
    /// It was promoted, and its volumes are served at the source as well.
    Diverged,
    /// A migration has used it.
    Used,
    /// It does not run at this moment: a volume is not served here, or the daemon has just begun.
    Waiting,
}

/// A standby, as one of its two hosts sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Standby {
    /// Its name at this host: that of the volume or VM, and that of the other host.
    pub name: String,
    /// Its identity, the same at both hosts: 32 hexadecimal digits.
    pub id: String,
    /// The part of this host.
    pub role: StandbyRole,
    /// The other host.
    pub host: String,
    /// The store at the standby's host.
    pub store: String,
    /// Its volumes, by name.
    pub volumes: Vec<String>,
    /// Its state.
    pub state: StandbyState,
    /// What it waits for, or why it is in that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds since the state that a promotion would bring back; `None`: there is none, or it is not known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<f64>,
    /// Seconds between two cuts. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<f64>,
    /// The age in seconds beyond which it is behind. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo_seconds: Option<f64>,
    /// The most bytes a second that it sends. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_second: Option<u64>,
    /// What a start does if the other host says nothing; `None`: what the configuration says. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_silent: Option<IfSilent>,
    /// Bytes that the standby lacks. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_waiting: Option<u64>,
    /// Bytes that were sent since the daemon began. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_sent: Option<u64>,
    /// Bytes that the other host had already, and that were only compared, since the daemon began. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_found: Option<u64>,
    /// The last comparison of everything, which may be under way. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<StandbyCheck>,
    /// The last comparison that has reached its end; `None`: there was none, or it is not known. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<StandbyCompared>,
    /// Its last export since the daemon began. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<StandbyExport>,
    /// How often everything is compared by itself, in seconds; `None`: only if it is ordered. At the source only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify_seconds: Option<f64>,
    /// The VMs whose volumes are all in it: a promotion starts them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<StandbyVm>,
    /// The recovery points, the oldest first. At the standby's host only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<RecoveryPoint>,
    /// Its test: the present one, or the last. At the standby's host only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test: Option<StandbyTest>,
}

/// A comparison of all blocks of a standby with those of its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyCheck {
    /// When it was begun, in milliseconds since 1970.
    pub begun_unix_ms: u64,
    /// When it has ended, in milliseconds since 1970; `None`: it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Why it has ended before everything was compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupted: Option<String>,
    /// Whether it was interrupted because blocks cannot be read.
    #[serde(default)]
    pub failed: bool,
    /// Whether an administrator has ordered it; else the configuration has.
    #[serde(default)]
    pub ordered: bool,
    /// Bytes of the volumes.
    pub bytes_total: u64,
    /// Bytes that were compared.
    pub bytes_done: u64,
    /// Bytes of these that the standby lacked just then, or that guests wrote meanwhile: they are sent anyway.
    pub bytes_left_out: u64,
    /// Bytes that differ without such a reason. They are sent again.
    pub bytes_differing: u64,
}

/// An export of a standby into a folder, which somebody carries to the standby's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyExport {
    /// The folder.
    pub folder: String,
    /// When it was begun, in milliseconds since 1970.
    pub begun_unix_ms: u64,
    /// When it has ended, in milliseconds since 1970; `None`: it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Why there is no folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Bytes that were written.
    pub bytes_written: u64,
    /// How far the last image is hashed, in bytes.
    pub bytes_hashed: u64,
}

/// A comparison of everything that has reached its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyCompared {
    /// When it ended, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Bytes that differed. They were sent again.
    pub bytes_differing: u64,
}

/// A test of a standby: volumes of the standby's host that are a clone of a recovery point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StandbyTest {
    /// Its name.
    pub name: String,
    /// How far it is.
    pub state: StandbyTestState,
    /// Why it ends, or cannot be deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The recovery point, once the clone is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<String>,
    /// Its volumes.
    pub volumes: Vec<StandbyTestVolume>,
    /// Its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<StandbyTestVm>,
    /// What it waits for on their consoles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_check: Option<BootCheck>,
    /// When it was ordered, in milliseconds since 1970.
    pub begun_unix_ms: u64,
    /// When it ends at the latest, in milliseconds since 1970.
    pub ends_unix_ms: u64,
    /// Bytes that were copied for it, while it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_done: Option<u64>,
    /// Bytes that have to be copied, while it is made; `None`: it shares blocks with the standby.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<u64>,
}

/// How far a test of a standby is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StandbyTestState {
    /// Its clone is made.
    Making,
    /// Its volumes are served.
    Running,
    /// It is being deleted.
    Ending,
    /// Nothing of it is left.
    Ended,
}

/// A volume of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyTestVolume {
    /// Its name.
    pub name: String,
    /// The volume of which it is a clone.
    pub of: String,
    /// The URI at which it is served while the test is running.
    pub uri: String,
}

/// A VM of a standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyVm {
    /// The name of the VM.
    pub name: String,
    /// When the standby's host received what starting it takes, in milliseconds since 1970; `None`: never, or it is not known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub described_unix_ms: Option<u64>,
    /// Why it could not be started at the standby's host, or why it does not run after a promotion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A recovery point of a standby.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RecoveryPoint {
    /// Its name, for a promotion.
    pub name: String,
    /// The moment of the source whose state it has, by the clock of the standby's host, in milliseconds since 1970.
    pub as_of_unix_ms: u64,
}

/// A VM of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandbyTestVm {
    /// Its name.
    pub name: String,
    /// The VM of which it is a second instance.
    pub of: String,
}

/// A text that a test waits for on the serial consoles of its VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BootCheck {
    /// The text.
    pub text: String,
    /// Whether it has appeared.
    pub state: BootCheckState,
    /// Seconds from the start of the VMs until then, or until it was given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// Whether a text has appeared on a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BootCheckState {
    /// Not yet.
    Waiting,
    /// It has.
    Passed,
    /// It has not in time.
    Failed,
}
