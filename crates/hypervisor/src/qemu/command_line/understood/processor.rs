//! Models of processors and their features.

use super::value::Kind::{self, Number, Size, Switch, SwitchOrAuto, Text, Words};
use super::value::{self, Value};
use super::{Allowed, NotAllowed, Said, lexer};

/// Reads a model with its features: `host,+x2apic,pmu=off`.
pub(super) fn read(option: &'static str, text: &str, allowed: Allowed<'_>) -> Result<Said, NotAllowed> {
    let malformed = |what: &str, reason: &str| NotAllowed::malformed(option, what, reason);
    lexer::check_text(text).map_err(|fault| malformed(text, &fault))?;
    let mut parts = text.split(',');
    let model = parts.next().unwrap_or_default();
    if !value::is_name(model) {
        return Err(malformed(text, "has no model"));
    }
    let mut said = Said::default();
    said.add(option, MODEL, Value::Word(model.to_owned()))?;
    for part in parts {
        let (name, value) = match part.split_once('=') {
            Some((name, value)) => (name, value),
            None if part.starts_with('-') => (&part[1..], "off"),
            None => (part.strip_prefix('+').unwrap_or(part), "on"),
        };
        // QEMU has them with hyphens, and takes both.
        let name = name.replace('_', "-");
        let Some(kind) = feature(&name) else {
            return Err(NotAllowed::option(option, model, Some((&name, value))));
        };
        said.read(option, &name, kind, value, allowed)?;
    }
    Ok(said)
}

pub(super) const MODEL: &str = "";

fn feature(name: &str) -> Option<Kind> {
    let typed = TYPED.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
    let is_switch = FEATURES.iter().flat_map(|names| names.split(' ')).any(|known| known == name);
    typed.or(is_switch.then_some(Switch))
}

const LEVEL: Kind = Number(u32::MAX as u64);
const TYPED: [(&str, Kind); 24] = [
    ("family", LEVEL),
    ("guest-phys-bits", LEVEL),
    ("host-phys-bits-limit", LEVEL),
    ("hv-no-nonarch-coresharing", SwitchOrAuto),
    ("hv-spinlocks", LEVEL),
    ("hv-vendor-id", Text),
    ("level", LEVEL),
    ("min-level", LEVEL),
    ("min-xlevel", LEVEL),
    ("model", LEVEL),
    ("model-id", Text),
    ("phys-bits", LEVEL),
    ("stepping", LEVEL),
    ("tsc-frequency", Size),
    ("tsc-freq", Size),
    ("ucode-rev", Number(u64::MAX)),
    ("vendor", Words(&["GenuineIntel", "AuthenticAMD", "HygonGenuine", "CentaurHauls"])),
    ("xlevel", LEVEL),
    ("xlevel2", LEVEL),
    ("hv-version-id-build", LEVEL),
    ("hv-version-id-major", LEVEL),
    ("hv-version-id-minor", LEVEL),
    ("hv-version-id-spack", LEVEL),
    ("hv-version-id-sbranch", LEVEL),
];

/// Switches: of the processor itself, of KVM and Hyper-V, of QEMU's treatment of it, of Arm.
const FEATURES: [&str; 4] = [
    "3dnow 3dnowext 3dnowprefetch abm ace2 ace2-en acpi adx aes amd-no-ssb amd-psfd amd-ssbd amd-stibp amx-bf16 \
     amx-complex amx-fp16 amx-int8 amx-tile apic arat arch-capabilities arch-lbr auto-ibrs avic avx avx-ifma \
     avx-ne-convert avx-vnni avx-vnni-int16 avx-vnni-int8 avx10 avx2 avx512-4fmaps avx512-4vnniw avx512-bf16 \
     avx512-fp16 avx512-vp2intersect avx512-vpopcntdq avx512bitalg avx512bw avx512cd avx512dq avx512er avx512f \
     avx512ifma avx512pf avx512vbmi avx512vbmi2 avx512vl avx512vnni bhi-ctrl bhi-no bmi1 bmi2 bus-lock-detect \
     cet-ibt cet-ss cid cldemote clflush clflushopt clwb clzero cmov cmp-legacy cmpccxadd core-capability \
     cr8legacy cx16 cx8 dca ddpd-u de decodeassists ds ds-cpl dtes64 erms est extapic f16c fb-clear fbsdp-no \
     ffxsr flush-l1d flushbyasid fma fma4 fpu fred fsgsbase fsrc fsrm fsrs full-width-write fxsr fxsr-opt fzrm \
     gds-no gfni hle ht hypervisor i64 ia64 ibpb ibpb-brtype ibrs ibrs-all ibs intel-psfd intel-pt intel-pt-lip \
     invpcid invtsc ipred-ctrl its-no kvm-asyncpf kvm-asyncpf-int kvm-hint-dedicated kvm-mmu kvm-msi-ext-dest-id \
     kvm-nopiodelay kvm-poll-control kvm-pv-eoi kvm-pv-ipi kvm-pv-sched-yield kvm-pv-tlb-flush kvm-pv-unhalt \
     kvm-steal-time kvmclock kvmclock-stable-bit la57 lahf-lm lam lbrv lfence-always-serializing lkgs lm lwp mca \
     mcdt-no mce md-clear mds-no misalignsse mmx mmxext monitor movbe movdir64b movdiri mpx msr mtrr \
     no-nested-data-bp nodeid-msr npt nrip-save null-sel-clr-base nx osvw overflow-recov pae pat pause-filter pbe \
     pbrsb-no pcid pclmulqdq pcommit pdcm pdpe1gb perfctr-core perfctr-nb perfmon-v2 pfthreshold pge phe phe-en \
     pks pku pmm pmm-en pn pni popcnt prefetchi prefetchiti pschange-mc-no psdp-no pse pse36 rdctl-no rdpid \
     rdrand rdseed rdtscp rfds-clear rfds-no rrsba-ctrl rsba rtm sbdr-ssdp-no sbpb sep serialize sgx sgx-debug \
     sgx-exinfo sgx-kss sgx-mode64 sgx-provisionkey sgx-tokenkey sgx1 sgx2 sgxlc sha-ni sha512 skinit \
     skip-l1dfl-vmentry sm3 sm4 smap smep smx spec-ctrl split-lock-detect srso-no srso-user-kernel-no ss ssb-no \
     ssbd sse sse2 sse4-1 sse4-2 sse4.1 sse4.2 sse4a ssse3 stibp stibp-always-on succor svm svm-lock \
     svme-addr-chk syscall taa-no tbm tce tm tm2 topoext tsc tsc-adjust tsc-deadline tsc-scale tsx-ctrl tsx-ldtrk \
     umip v-vmsave-vmload vaes vgif virt-ssbd vmcb-clean vme vmx vmx-activity-hlt vmx-activity-shutdown \
     vmx-activity-wait-sipi vmx-apicv-register vmx-apicv-vid vmx-apicv-x2apic vmx-apicv-xapic vmx-cr3-load-noexit \
     vmx-cr3-store-noexit vmx-cr8-load-exit vmx-cr8-store-exit vmx-desc-exit vmx-encls-exit vmx-entry-ia32e-mode \
     vmx-entry-load-bndcfgs vmx-entry-load-efer vmx-entry-load-pat vmx-entry-load-perf-global-ctrl \
     vmx-entry-load-pkrs vmx-entry-load-rtit-ctl vmx-entry-noload-debugctl vmx-ept vmx-ept-1gb vmx-ept-2mb \
     vmx-ept-advanced-exitinfo vmx-ept-execonly vmx-eptad vmx-eptp-switching vmx-exit-ack-intr \
     vmx-exit-clear-bndcfgs vmx-exit-clear-rtit-ctl vmx-exit-load-efer vmx-exit-load-pat \
     vmx-exit-load-perf-global-ctrl vmx-exit-load-pkrs vmx-exit-nosave-debugctl vmx-exit-save-efer \
     vmx-exit-save-pat vmx-exit-save-preemption-timer vmx-flexpriority vmx-hlt-exit vmx-ins-outs vmx-intr-exit \
     vmx-invept vmx-invept-all-context vmx-invept-single-context vmx-invept-single-context-noglobals \
     vmx-invlpg-exit vmx-invpcid-exit vmx-invvpid vmx-invvpid-all-context vmx-invvpid-single-addr vmx-io-bitmap \
     vmx-io-exit vmx-monitor-exit vmx-movdr-exit vmx-msr-bitmap vmx-mtf vmx-mwait-exit vmx-nmi-exit \
     vmx-page-walk-4 vmx-page-walk-5 vmx-pause-exit vmx-ple vmx-pml vmx-posted-intr vmx-preemption-timer \
     vmx-rdpmc-exit vmx-rdrand-exit vmx-rdseed-exit vmx-rdtsc-exit vmx-rdtscp-exit vmx-secondary-ctls \
     vmx-shadow-vmcs vmx-store-lma vmx-true-ctls vmx-tsc-offset vmx-tsc-scaling vmx-unrestricted-guest \
     vmx-vintr-pending vmx-vmfunc vmx-vmwrite-vmexit-fields vmx-vnmi vmx-vnmi-pending vmx-vpid vmx-wbinvd-exit \
     vmx-xsaves vmx-zero-len-inject vnmi vpclmulqdq waitpkg wbnoinvd wdt wrmsrns x2apic xcrypt xcrypt-en xd xfd \
     xgetbv1 xop xsave xsavec xsaveerptr xsaveopt xsaves xstore xstore-en xtpr",
    "hv-apicv hv-avic hv-crash hv-emsr-bitmap hv-enforce-cpuid hv-evmcs hv-frequencies hv-ipi hv-passthrough hv-reenlightenment \
     hv-relaxed hv-reset hv-runtime hv-stimer hv-stimer-direct hv-synic hv-syndbg hv-time hv-tlbflush hv-tlbflush-direct \
     hv-tlbflush-ext hv-vapic hv-vpindex hv-xmm-input kvm kvm-pv-enforce-cpuid",
    "check enforce cpuid-0xb fill-mtrr-mask full-cpuid-auto-level host-cache-info host-phys-bits l3-cache legacy-cache \
     lmce migratable tcg-cpuid vmware-cpuid-freq",
    "aarch64 pauth pauth-impdef sve sve128 sve256 sve512 sme el2 el3 kvm-no-adjvtime",
];
