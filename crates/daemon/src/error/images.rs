//! The API's codes for errors of images.

use api::ErrorCode;
use block::store::{ImageError, Qcow2Error, RemoteError};

pub(super) fn code_of_qcow2(error: &Qcow2Error) -> ErrorCode {
    match error {
        Qcow2Error::Image(error) => code_of_image(error),
        // Any fault of its backing file means that it cannot be served.
        _ => ErrorCode::ImageUnsuitable,
    }
}

/// Returns the API's code of an error of another server's export.
pub(super) fn code_of_remote(error: &RemoteError) -> ErrorCode {
    match error {
        RemoteError::Unreachable { .. } => ErrorCode::StorageFailed,
        RemoteError::TooSmall { .. } => ErrorCode::TargetTooSmall,
        RemoteError::Tls { .. }
        | RemoteError::Refused { .. }
        | RemoteError::Protocol { .. }
        | RemoteError::BlockTooLarge { .. }
        | RemoteError::OddSize { .. }
        | RemoteError::ReadOnly { .. }
        | RemoteError::NoFlush { .. }
        | RemoteError::Changed { .. } => ErrorCode::ImageUnsuitable,
    }
}

pub(super) fn code_of_image(error: &ImageError) -> ErrorCode {
    match error {
        ImageError::NotFound { .. } => ErrorCode::ImageNotFound,
        ImageError::Exists { .. } => ErrorCode::TargetExists,
        ImageError::NotRegular { .. }
        | ImageError::ReadOnlyDevice { .. }
        | ImageError::SectorTooLarge { .. } => ErrorCode::ImageUnsuitable,
        ImageError::Locked { .. } | ImageError::DeviceInUse { .. } => ErrorCode::ImageInUse,
        ImageError::TooSmall { .. } | ImageError::TooLarge { .. } => ErrorCode::TargetTooSmall,
        ImageError::NoSpace { .. } => ErrorCode::NoSpace,
        ImageError::NotPermitted { .. } => ErrorCode::NotPermitted,
        ImageError::Os { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
            ErrorCode::NotPermitted
        }
        ImageError::Os { .. } => ErrorCode::StorageFailed,
    }
}
