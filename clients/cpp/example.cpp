// Asks a Kestrel gRPC server about a picture: example ADDRESS PICTURE
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kestrel/v1/vision_service.grpc.pb.h"

using namespace kestrel::v1;

// Each call needs a context of its own, which has its deadline.
std::unique_ptr<grpc::ClientContext> ContextFor(std::chrono::milliseconds timeout) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + timeout);
  return context;
}

int main(int, char** arguments) {
  auto vision = VisionService::NewStub(grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials()));
  std::ifstream file(arguments[2], std::ios::binary);
  Image image;
  image.mutable_data()->assign(std::istreambuf_iterator<char>(file), {});

  // A stream: pieces of the answer as they are generated, then the whole.
  QueryRequest query;
  query.set_question("What is in this image?");
  *query.mutable_image() = image;
  query.mutable_sampling()->set_temperature(0);
  std::printf("query: ");
  auto context = ContextFor(std::chrono::minutes(1));
  auto answer = vision->Query(context.get(), query);
  std::string said;
  for (QueryResponse response; answer->Read(&response);) {
    std::printf("%s", response.delta().text().c_str());  // empty for other events
    const auto& usage = response.completed().info().usage();
    if (response.has_completed()) std::printf(" (%d tokens)\n", usage.output_token_count());
    if (response.has_completed()) said = response.completed().answer();
  }
  if (auto status = answer->Finish(); !status.ok()) std::printf("failed: %s\n", status.error_message().c_str());

  // A conversation: what was asked and answered before, each message with its texts and images, and a question.
  CompleteChatRequest chat;
  *chat.mutable_sampling() = query.sampling();
  auto message = [&chat](ChatRole role, const std::string& text) {
    auto* added = chat.add_messages();
    added->set_role(role);
    added->add_parts()->set_text(text);
    return added;
  };
  *message(CHAT_ROLE_USER, query.question())->add_parts()->mutable_image() = image;
  message(CHAT_ROLE_ASSISTANT, said);
  message(CHAT_ROLE_USER, "What color is the star?");
  CompleteChatResponse reply;
  auto status = vision->CompleteChat(ContextFor(std::chrono::minutes(1)).get(), chat, &reply);
  if (!status.ok()) std::printf("failed: %s\n", status.error_message().c_str());
  std::printf("chat: %s\n", reply.result().answer().c_str());

  DetectRequest detect;
  detect.set_object("shape");
  *detect.mutable_image() = image;
  DetectResponse found;
  status = vision->Detect(ContextFor(std::chrono::minutes(1)).get(), detect, &found);
  if (!status.ok()) std::printf("failed: %s\n", status.error_message().c_str());
  for (const auto& object : found.objects()) {
    const auto& box = object.box();
    std::printf("detect: %.2f %.2f %.2f %.2f\n", box.x_min(), box.y_min(), box.x_max(), box.y_max());
  }

  // The details of a status say why, in words that programs can compare.
  detect.mutable_options()->set_model("other");
  status = vision->Detect(ContextFor(std::chrono::minutes(1)).get(), detect, &found);
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.UnpackTo(&info)) std::printf("error: %s: %s\n", info.reason().c_str(), status.error_message().c_str());
  }

  // A deadline that passes, and a cancellation: each frees what the request holds in the server.
  QueryRequest longer;
  longer.set_question("?");
  longer.mutable_constraint()->set_regex("[a-z ]{900}");  // an answer of 900 letters
  QueryResponse response;
  context = ContextFor(std::chrono::milliseconds(500));
  answer = vision->Query(context.get(), longer);
  while (answer->Read(&response)) continue;
  bool passed = answer->Finish().error_code() == grpc::DEADLINE_EXCEEDED;
  std::printf("deadline has passed: %s\n", passed ? "true" : "false");

  context = ContextFor(std::chrono::minutes(1));
  answer = vision->Query(context.get(), longer);
  while (answer->Read(&response)) context->TryCancel();
  std::printf("cancelled: %s\n", answer->Finish().error_code() == grpc::CANCELLED ? "true" : "false");
}
