//! VMs at this host: adopted and released, moved, and settled where their volumes are.

pub(in crate::host) mod adopt;
pub(in crate::host) mod adopted;
pub(in crate::host) mod bind;
pub(in crate::host) mod cold;
pub(in crate::host) mod exchange;
pub(in crate::host) mod growth;
pub(in crate::host) mod libvirt;
pub(crate) mod manage;
pub(in crate::host) mod move_vm;
pub(in crate::host) mod preflight;
pub(in crate::host) mod prove;
pub(in crate::host) mod stall;
pub(in crate::host) mod standing;
