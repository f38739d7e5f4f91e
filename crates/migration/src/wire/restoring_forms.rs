//! The encoded form of messages about a restored journal.

use chronicle::Generation;
use serde::{Deserialize, Serialize};

use crate::identity::VolumeId;
use crate::restoration::{Knowledge, Whereabouts};

#[derive(Serialize, Deserialize)]
pub(super) struct KnownForm {
    volume: [u8; 16],
    generation: u64,
    whereabouts: WhereaboutsForm,
}

#[derive(Serialize, Deserialize)]
enum WhereaboutsForm {
    Here,
    HereUnconfirmed,
    Waits,
    WithYou,
    Elsewhere,
    AtAThird,
}

impl From<(VolumeId, Knowledge)> for KnownForm {
    fn from((volume, known): (VolumeId, Knowledge)) -> Self {
        let whereabouts = match known.whereabouts {
            Whereabouts::Here => WhereaboutsForm::Here,
            Whereabouts::HereUnconfirmed => WhereaboutsForm::HereUnconfirmed,
            Whereabouts::Waits => WhereaboutsForm::Waits,
            Whereabouts::WithYou => WhereaboutsForm::WithYou,
            Whereabouts::Elsewhere => WhereaboutsForm::Elsewhere,
            Whereabouts::AtAThird => WhereaboutsForm::AtAThird,
        };
        Self { volume: volume.0, generation: known.generation.0, whereabouts }
    }
}

impl From<KnownForm> for (VolumeId, Knowledge) {
    fn from(form: KnownForm) -> Self {
        let whereabouts = match form.whereabouts {
            WhereaboutsForm::Here => Whereabouts::Here,
            WhereaboutsForm::HereUnconfirmed => Whereabouts::HereUnconfirmed,
            WhereaboutsForm::Waits => Whereabouts::Waits,
            WhereaboutsForm::WithYou => Whereabouts::WithYou,
            WhereaboutsForm::Elsewhere => Whereabouts::Elsewhere,
            WhereaboutsForm::AtAThird => Whereabouts::AtAThird,
        };
        (VolumeId(form.volume), Knowledge { generation: Generation(form.generation), whereabouts })
    }
}
